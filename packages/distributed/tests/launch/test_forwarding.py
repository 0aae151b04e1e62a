"""Variables travel by exact name or strict prefix, and secrets never."""

from __future__ import annotations

import pytest

from gaudi_distributed.errors import ConfigurationError, FlagError, UnsafeError
from gaudi_distributed.launch.flags import parse_flags
from gaudi_distributed.launch.planning import choose_forwarded, choose_local, is_secret, plan_launch, refuse_ranks

FORWARDED = [
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "TF_CPP_MIN_LOG_LEVEL", "TPC_RUNNER"),
    *("GC_KERNEL_PATH", "HABANA_LOGS", "HBN_X", "HOROVOD_CYCLE_TIME", "SYN_X", "HCL_CONFIG_PATH", "HCCL_OVER_TCP"),
    *("NCCL_DEBUG", "LOG_LEVEL_ALL", "ENABLE_CONSOLE", "OMP_NUM_THREADS"),
    *("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_DIR"),
    *("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"),
]
KEPT_BACK = [
    *(
        "EDITOR",
        "HOME",
        "SSH_AUTH_SOCK",
        "PATHS",
        "LD_AUDIT",
        "LD_DEBUG",
        "PYTHONSTARTUP",
        "TFX",
        "HABANALABS",
        "MY_PATH",
    ),
    *("TF_API_TOKEN", "TF_VAR_db_password", "HABANA_SECRET", "HCCL_KEY", "ENABLE_AWS_CREDENTIALS", "NCCL_Private"),
    *(
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "WANDB_API_KEY",
        "AZURE_X",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GITHUB_X",
        "HF_HOME",
        "SLURM_JWT",
    ),
    *("GAUDI_RUN_TOKEN", "BASH_FUNC_TF_x%%", "TF_x y", "TF_CONFIG", "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE"),
]


def test_names() -> None:
    environ = dict.fromkeys([*FORWARDED, *KEPT_BACK], "x")
    assert choose_forwarded(environ) == tuple(sorted(FORWARDED))
    assert choose_forwarded(environ, ["EDITOR"]) == tuple(sorted([*FORWARDED, "EDITOR"]))


@pytest.mark.parametrize(
    "name", ["AWS_X", "WANDB_API_KEY", "MY_TOKEN", "my_password", "API_KEY", "DbSecret", "SSH_AUTH_SOCK"]
)
def test_secrets_are_refused_even_by_name(name: str) -> None:
    assert is_secret(name)
    with pytest.raises(UnsafeError, match="like a secret"):
        choose_forwarded({name: "x"}, [name])


@pytest.mark.parametrize(
    ("value", "is_good"),
    [
        ("http://user:word@host:5000", False),
        ("postgresql://user@host/runs", False),
        ("http://host:5000/@user", True),
        ("databricks://profile", True),
        ("/folder/runs@home", True),
    ],
)
def test_a_user_or_a_password_in_a_url_stays_here(value: str, is_good: bool) -> None:
    environ, name = {"MLFLOW_TRACKING_URI": value}, "MLFLOW_TRACKING_URI"
    assert choose_forwarded(environ) == (name,) * is_good
    notes = plan_launch(parse_flags(["--np", "1", "--dry_run", "sh"]), environ).notes
    assert any(note.startswith(name) for note in notes) != is_good
    assert not any("word" in note.replace("password", "") for note in notes)
    if not is_good:
        with pytest.raises(UnsafeError) as caught:
            choose_forwarded(environ, [name])
        assert (caught.value.flag, value in str(caught.value)) == ("--forward", False)


@pytest.mark.parametrize("name", ["A=b", "", "a-b", "-x", "A\nB", "é"])
def test_values_and_what_is_no_name_are_refused(name: str) -> None:
    with pytest.raises(FlagError, match="not a name"):
        choose_forwarded({name: "x"}, [name])


def test_the_agent_is_for_ssh_only() -> None:
    environ = dict.fromkeys(["HOME", "SSH_AUTH_SOCK", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_JWT", "EDITOR"], "x")
    assert choose_local(environ, ssh=False) == ("HOME", "SLURM_JOB_ID")
    assert choose_local(environ, ssh=True) == ("HOME", "SLURM_JOB_ID", "SSH_AUTH_SOCK")


@pytest.mark.parametrize(
    "name",
    ["HOROVOD_RANK", "HOROVOD_CROSS_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_SIZE", "TF_CONFIG", "MPI_LOCALRANKID"],
)
def test_a_rank_cannot_launch(name: str) -> None:
    refuse_ranks({"HOROVOD_CYCLE_TIME": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"})
    with pytest.raises(ConfigurationError, match=f"{name} set: gaudi-run"):
        refuse_ranks({name: "0"})
