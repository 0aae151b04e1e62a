"""The cost of many ranks, in the plans of all programs: fields, what they rest on, and what a real run has of it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.cli.flags import DistributionFlags
from gaudi_apps.cli.launch import describe_step
from gaudi_apps.cli.program import drop_plan_flags
from gaudi_models.architectures import RESNETS, list_classifier_tensors, list_ssd_tensors
from gaudi_ops.scaling import Links, checkpoint_seconds, predict_step, start_seconds

PROGRAMS = ("ssd_train", "resnet_train", "resnext_train", "ssd_mxnet_train")
LAUNCH = ("--plan_ranks", "1024", "--bandwidth_gbps", "100")
FRAMEWORKS = "sys.modules['tensorflow'] = sys.modules['mxnet'] = None"


PLAN = ("--mode", "plan", "--json", "--num_examples_per_epoch", "99999")
PrintPlan = Callable[..., Any]


@pytest.fixture
def print_plan(run_main: Callable[..., Any], tmp_path: Path) -> PrintPlan:
    """Return what a program says of many ranks."""

    def run(program: str, *argv: str) -> Any:
        main = importlib.import_module(f"gaudi_apps.{program}").main
        done = run_main(main, [*PLAN, "--model_dir", tmp_path / "run", *argv])
        assert done.status == 0, done.err
        return json.loads(done.out).get("scaling")

    return run


@pytest.mark.costly
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_fields_of_each_program(program: str, tmp_path: Path) -> None:
    """In a process that must not import a framework."""
    code = f"import sys\n{FRAMEWORKS}\nfrom gaudi_apps.{program} import PROGRAM\nPROGRAM.run()"
    given = ("--step_seconds", "0.25", "--model_dir", str(tmp_path), "--batch_size", "16")
    done = subprocess.run([sys.executable, "-c", code, *PLAN, *LAUNCH, *given], capture_output=True, check=True)
    found = json.loads(done.stdout)["scaling"]
    basis, sizes = found["basis"], found["sizes"]
    kinds = {name: entry["is"] for name, entry in basis.items()}
    assert {name for name, kind in kinds.items() if kind == "given"} == {
        *("plan_ranks", "bandwidth_gbps", "step_seconds"),
    }
    assert {name for name, kind in kinds.items() if kind == "assumed"} == {
        *("latency_us", "disk_mbps", "host_bandwidth_gbps", "ranks_per_host", "wait_ms"),
        *("backward_share", "hashing_mbps", "joining_ms"),
    }
    assert {name for name, kind in kinds.items() if kind == "computed"} == {
        *("gradient_bytes", "buckets", "statistics_bytes", "batch_norm_sums", "checkpoint_bytes"),
    }
    assert kinds["memory_bytes"] == "estimated"
    assert [(one["ranks"], one["hosts"]) for one in sizes] == [(8, 1), (64, 8), (512, 64), (1024, 128)]
    for one in sizes:
        assert one["images_per_second"] == pytest.approx(one["ranks"] * 16 / one["step_seconds"])
        assert one["efficiency"] == pytest.approx(0.25 / one["step_seconds"])
        assert 0 <= one["hidden_seconds"] < one["allreduce_seconds"]
        assert one["batch_norm_seconds"] == 0
    assert sizes[0]["efficiency"] > sizes[-1]["efficiency"] > 0.5


def test_the_numbers_are_those_of_the_formulas(print_plan: PrintPlan) -> None:
    given = ("--latency_us=5", "--disk_mbps=1000", "--step_seconds=.3", "--ranks_per_host=4")
    found = print_plan("ssd_train", *LAUNCH, *given, "--host_bandwidth_gbps=800")
    tensors = list_ssd_tensors(80)
    links = Links(1024, 4, 100e9 / 8, 800e9 / 8, 5e-6, 5e-4)
    statistics = 4 * 2 * sum(tensors.channels)
    step = predict_step(describe_step(tensors, DistributionFlags())._replace(seconds=0.3), links)
    last = found["sizes"][-1]
    assert last["step_seconds"] == pytest.approx(step.step)
    assert (last["allreduce_seconds"], last["hidden_seconds"]) == pytest.approx((step.allreduce, step.hidden))
    size = found["basis"]["checkpoint_bytes"]["value"]
    assert size == 8 * tensors.parameters + statistics
    assert last["checkpoint_seconds"] == pytest.approx(checkpoint_seconds(size, 1e9, 4e8, links))
    messages = 2 * len(tensors.trainable) + 2 * len(tensors.channels)
    assert last["start_seconds"] == pytest.approx(start_seconds(size, messages, 0.004, links))
    assert found["basis"]["gradient_bytes"]["value"] == 4 * tensors.parameters


def test_what_the_flags_of_ranks_change(print_plan: PrintPlan) -> None:
    def predict(*argv: str) -> tuple[Any, Any]:
        given = (*LAUNCH, "--step_seconds", "0.25", "--use_horovod", *argv)
        found = print_plan("ssd_train", *given)
        return {name: entry["value"] for name, entry in found["basis"].items()}, found["sizes"][-1]

    plain, size = predict()
    half, faster = predict("--gradient_compression", "fp16")
    assert 2 * half["gradient_bytes"] == plain["gradient_bytes"]
    assert (plain["buckets"], half["buckets"]) == (2, 1)
    assert faster["allreduce_seconds"] < size["allreduce_seconds"]
    each, slower = predict("--fusion_threshold_mb", "0")
    assert each["buckets"] == len(list_ssd_tensors(80).trainable)
    assert slower["allreduce_seconds"] > size["allreduce_seconds"]
    _, rings = predict("--horovod_hierarchical_allreduce")
    assert rings["allreduce_seconds"] < size["allreduce_seconds"]
    together, summed = predict("--distributed_bn", "--bn_group", "8")
    assert together["batch_norm_sums"] == 2 * len(list_ssd_tensors(80).channels)
    assert 0 < summed["batch_norm_seconds"] < predict("--distributed_bn")[1]["batch_norm_seconds"]


def test_groups_of_gradients_in_mxnet(print_plan: PrintPlan) -> None:
    given = (*LAUNCH, "--step_seconds", "0.25")
    three = print_plan("ssd_mxnet_train", *given, "--horovod_num_groups", "3", "--bn_group", "4")["basis"]
    assert three["buckets"]["value"] == 3
    assert three["batch_norm_sums"]["value"] == 2 * len(list_ssd_tensors(80).channels)
    each = print_plan("ssd_mxnet_train", *given, "--horovod_num_groups", "0")["basis"]
    assert each["buckets"]["value"] == len(list_ssd_tensors(80).trainable)


def test_sizes_are_those_that_hosts_can_be_filled_with(print_plan: PrintPlan) -> None:
    def list_ranks(ranks: int, *argv: str) -> list[int]:
        given = ("--plan_ranks", f"{ranks}", "--bandwidth_gbps", "1", *argv)
        return [one["ranks"] for one in print_plan("resnet_train", *given)["sizes"]]

    assert list_ranks(4) == [4]
    assert list_ranks(64) == [8, 64]
    assert list_ranks(96, "--ranks_per_host", "6") == [96]
    assert list_ranks(96, "--ranks_per_host", "16") == [8, 64, 96]


@pytest.mark.parametrize(
    "log",
    [
        None,
        {"plan": {"workers": 2, "global_batch": 16}, "starts": [{"images_per_second": 8.0}]},
        {"plan": {"workers": 1, "global_batch": 32}, "starts": [{"images_per_second": 8.0}]},
        {"plan": {"workers": 1, "global_batch": 16}, "starts": [{"images_per_second": None}]},
        {"plan": {"workers": 1, "global_batch": 16}, "starts": []},
        [],
    ],
)
def test_a_step_that_no_such_run_measured_is_unknown(log: Any, print_plan: PrintPlan, tmp_path: Path) -> None:
    if log is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "run_log.json").write_text(json.dumps(log))
    found = print_plan("resnext_train", *LAUNCH, "--batch_size", "16")
    assert found["basis"]["step_seconds"] == {"value": None, "is": "unknown"}
    last = found["sizes"][-1]
    assert {name for name, value in last.items() if value is None} == {
        *("hidden_seconds", "step_seconds", "efficiency", "images_per_second"),
    }


def test_without_its_flag_a_plan_predicts_nothing(print_plan: PrintPlan) -> None:
    assert print_plan("ssd_train") is None


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("arguments", "flag", "named"),
    [
        ("--mode plan --plan_ranks 0 --bandwidth_gbps 1", "--plan_ranks", "at least 1"),
        ("--mode plan --plan_ranks 8 --bandwidth_gbps -1", "--bandwidth_gbps", "above 0"),
        ("--mode plan --plan_ranks 8 --bandwidth_gbps inf", "--bandwidth_gbps", "finite"),
        ("--mode plan --plan_ranks 12 --bandwidth_gbps 1", "--ranks_per_host", "--ranks_per_host 8: "),
        ("--mode plan --plan_ranks 8 --bandwidth_gbps 1 --ranks_per_host 3", "--ranks_per_host", "8 ranks"),
        ("--mode plan --plan_ranks 8 --bandwidth_gbps 1 --latency_us -1", "--latency_us", "at least 0"),
        ("--mode plan --plan_ranks 8 --bandwidth_gbps 1 --step_seconds 0", "--step_seconds", "above 0"),
        ("--mode plan --plan_ranks 8", "--plan_ranks", "--bandwidth_gbps"),
        ("--mode plan --disk_mbps 8", "--disk_mbps", "--plan_ranks"),
        ("--mode train --plan_ranks 8 --bandwidth_gbps 1", "--plan_ranks", "mode is train"),
    ],
)
def test_errors_name_the_flag(
    run_main: Callable[..., Any], program: str, arguments: str, flag: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # an import of it would fail otherwise
    main = importlib.import_module(f"gaudi_apps.{program}").main
    done = run_main(main, ["--use_fake_data", *arguments.split()])
    assert (done.status, done.error.flag) == (64, flag)
    assert named in done.err


def test_networks_of_keras_applications_are_refused(run_main: Callable[..., Any]) -> None:
    from gaudi_apps.resnet_train import main

    done = run_main(main, ["--mode", "plan", "--use_fake_data", "--model", "resnet50_keras", *LAUNCH])
    assert (done.status, done.error.flag) == (64, "--plan_ranks")
    assert "--model resnet50" in done.err


def test_the_launched_command_has_no_flags_of_the_plan() -> None:
    given = ("--use_horovod", "--hvd_workers=2", "--latency_us=3", *LAUNCH, "--seed", "1")
    assert drop_plan_flags(["--mode", "plan", "--json", *given]) == ["--use_horovod", "--hvd_workers=2", "--seed", "1"]


@pytest.mark.costly
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_tensors_and_buckets_are_those_of_the_network(name: str) -> None:
    from gaudi_distributed.comm.communicator import plan_buckets
    from gaudi_models import build_classifier

    model = build_classifier(name, 1000)
    counted, flags = list_classifier_tensors(RESNETS[name], 1000), DistributionFlags(fusion_threshold_mb=16)
    sizes = [each.shape.num_elements() for each in model.trainable_variables]
    assert sorted(sizes) == sorted(values for values, _ in counted.trainable)
    changing = [each.shape.num_elements() for each in model.non_trainable_variables]
    assert sorted(changing) == sorted([*counted.channels, *counted.channels])
    real = [sum(4 * sizes[place] for place in one) for one in plan_buckets([("", 4 * n) for n in sizes], 16 << 20)]
    buckets = describe_step(counted, flags).buckets
    assert [size for _, size in buckets] == pytest.approx(real, rel=0.25)  # within a block, the order is another
    shares = [share for share, _ in buckets]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < 0.3  # the last bucket is ready early in the backward pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "given"),
    [
        ("ssd_train", "--backbone resnet18 --ema_decay .9 --no_evaluate --save_summary_steps 9"),
        ("resnet_train", "--model resnet18 --image_size 64 --optimizer Adam --ema_decay .9 --skip_eval"),
        ("resnext_train", "--resnet_size 50 --ema_decay .9"),
        ("ssd_mxnet_train", ""),
    ],
)
def test_a_real_run_has_measured_its_step_and_written_these_bytes(
    program: str, given: str, tmp_path: Path, print_plan: PrintPlan
) -> None:
    from safetensors.numpy import load_file

    shared = ["--use_fake_data", "--model_dir", str(tmp_path / "run"), "--batch_size", "2", *given.split()]
    shared += ["--precision" if program == "ssd_mxnet_train" else "--dtype", "fp32"]
    command = [sys.executable, "-m", f"gaudi_apps.{program}"]
    mode = ["--mode", "train", "--steps", "3", "--num_examples_per_epoch", "99999"]
    subprocess.run([*command, *mode, *shared], check=True, capture_output=True, text=True)
    (path,) = (tmp_path / "run" / "checkpoints").glob("*/state.safetensors")
    basis = print_plan(program, *LAUNCH, *shared, "--steps", "3")["basis"]
    planned = subprocess.run([*command, *PLAN, *shared], check=True, capture_output=True)
    for state_bytes in (basis["checkpoint_bytes"]["value"], json.loads(planned.stdout)["checkpoint_bytes"]):
        assert state_bytes == sum(tensor.nbytes for tensor in load_file(path).values())
    assert basis["step_seconds"]["is"] == "measured"
    log = json.loads((tmp_path / "run" / "run_log.json").read_text())
    assert basis["step_seconds"]["value"] == pytest.approx(2 / log["starts"][-1]["images_per_second"])
