from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gaudi_apps.cli.flag_rules import check_bounds
from gaudi_apps.cli.flags import DistributionFlags, check_distribution
from gaudi_apps.cli.launch import count_workers, fill_distribution_flags, find_distribution, share_batch
from gaudi_apps.detection import config as ssd_config
from gaudi_apps.detection.plan import make_plan
from gaudi_apps.resnet_train import ResNetConfig, make_train_config
from gaudi_apps.runtime.settings import Distribution
from gaudi_datasets.errors import FlagError
from gaudi_datasets.flags import parse_flags
from gaudi_distributed import ConfigurationError, DeviceKind
from gaudi_distributed.cluster.rank_info import RankInfo

RANK_1_OF_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
ALONE_IN_MPI = {**dict.fromkeys(RANK_1_OF_4, "0"), "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


def cpu() -> DeviceKind:
    return "cpu"


def read(text: str) -> DistributionFlags:
    flags: DistributionFlags = parse_flags(DistributionFlags, text.split(), prog="program")
    check_bounds(flags)
    check_distribution(flags)
    return flags


@pytest.mark.parametrize(
    ("text", "flag", "named"),
    [
        (
            "--use_horovod --distribution_strategy hpu",
            "--use_horovod",
            "--distribution_strategy hpu",
        ),
        ("--hvd_workers 2", "--hvd_workers", "give --use_horovod"),
        ("--hvd_workers -1", "--hvd_workers", "at least 0"),
        ("--distributed_bn", "--distributed_bn", "give --use_horovod"),
        ("--gradient_compression fp16", "--gradient_compression", "give --use_horovod"),
        ("--fusion_threshold_mb 0", "--fusion_threshold_mb", "give --use_horovod"),
        ("--use_horovod --fusion_threshold_mb -1", "--fusion_threshold_mb", "at least 0"),
        ("--use_horovod --bn_group 2", "--bn_group", "give --distributed_bn too"),
        ("-ds hpu --horovod_hierarchical_allreduce", "--horovod_hierarchical_allreduce", "give --use_horovod too"),
        ("-ds hpu --num_gpus 2", "--num_gpus", "--distribution_strategy mirrored too"),
        ("-ds mirrored -ng 2 --hvd_workers 3", "--num_gpus", "--hvd_workers 3"),
        ("-ds multi_worker --worker_hosts a:1,b:1", "--worker_hosts", "both or none"),
        ("-ds multi_worker --task_index 0", "--worker_hosts", "both or none"),
        ("-ds multi_worker --worker_hosts a:1,b:1 --task_index 2", "--task_index", "0 to 1"),
        ("-hvd --worker_hosts a:1,b:1 --task_index 0", "--worker_hosts", "--distribution_strategy multi_worker"),
        ("--kubernetes_run", "--kubernetes_run", "give --use_horovod"),
        ("--num_workers_per_hls 8", "--num_workers_per_hls", "give --use_horovod"),
        ("--use_horovod --num_workers_per_hls -1", "--num_workers_per_hls", "at least 0"),
    ],
)
def test_flags_that_contradict_each_other_are_named(text: str, flag: str, named: str) -> None:
    with pytest.raises(FlagError) as caught:
        read(text)
    assert caught.value.flag == flag
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_process_finds_its_place() -> None:
    found = find_distribution(read("--use_horovod --distributed_bn --gradient_compression fp16"), RANK_1_OF_4, cpu)
    assert (found.rank_info.rank, found.rank_info.size, found.batch_norm_group) == (1, 4, 4)
    assert (found.communication.engine, found.communication.compression) == ("horovod", "fp16")
    found = find_distribution(read("-ds mirrored --distributed_bn --bn_group 2"), RANK_1_OF_4, cpu)
    assert (found.communication.engine, found.batch_norm_group) == ("multi_worker", 2)
    assert find_distribution(read("-ds mirrored"), RANK_1_OF_4, lambda: "hpu").communication.engine == "hpu"
    assert find_distribution(read(""), {}, cpu).communication.engine == "single"
    # What one process of several is to do is said by the engine: none is an error of the communicator.
    assert find_distribution(read(""), RANK_1_OF_4, cpu).rank_info.size == 4


@pytest.mark.parametrize(
    ("text", "engine", "device", "expected"),
    [
        ("", "horovod", "hpu", "--use_horovod"),
        ("", "multi_worker", "cpu", "-ds multi_worker"),
        ("", "multi_worker", "hpu", "-ds hpu"),
        ("", "single", "cpu", ""),
        ("", None, "cpu", ""),
        ("--use_horovod", "horovod", "cpu", "--use_horovod"),
        ("-ds mirrored", "horovod", "cpu", "-ds mirrored"),
        ("-ds mirrored", "multi_worker", "cpu", "-ds mirrored"),
        ("--use_horovod", "single", "cpu", "--use_horovod"),
    ],
)
def test_without_a_flag_the_engine_is_what_gaudi_run_started_the_process_for(
    text: str, engine: str | None, device: DeviceKind, expected: str
) -> None:
    environ = {} if engine is None else {"GAUDI_RUN_ENGINE": engine}
    assert fill_distribution_flags(read(text), environ, lambda: device) == read(expected)


@pytest.mark.parametrize(
    ("text", "engine", "subject", "named"),
    [
        ("--use_horovod", "multi_worker", "--use_horovod", "--backend multi_worker"),
        ("", "nccl", "GAUDI_RUN_ENGINE", "'nccl'"),
    ],
)
def test_an_engine_that_contradicts_the_launch_is_named(text: str, engine: str, subject: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        fill_distribution_flags(read(text), {"GAUDI_RUN_ENGINE": engine}, cpu)
    assert (caught.value.flag or caught.value.field) == subject


def test_hosts_may_come_from_flags() -> None:
    flags = read("-ds multi_worker --worker_hosts a:2410,b:2410 --task_index 1")
    found = find_distribution(flags, {}, cpu)
    assert (found.rank_info.rank, found.rank_info.size) == (1, 2)
    assert json.loads(found.environment["TF_CONFIG"])["cluster"]["worker"] == ["a:2410", "b:2410"]
    with pytest.raises(FlagError, match="TF_CONFIG is set too"):
        find_distribution(flags, found.environment, cpu)
    with pytest.raises(ConfigurationError, match="is not host:port"):
        find_distribution(read("-ds multi_worker --worker_hosts a;ls:1 --task_index 0"), {}, cpu)


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("--use_horovod --hvd_workers 2", "--hvd_workers"),
        ("-ds mirrored --num_gpus 2", "--num_gpus"),
        ("--use_horovod --num_workers_per_hls 2", "--num_workers_per_hls"),
        ("--use_horovod --distributed_bn --bn_group 8", "--bn_group"),
    ],
)
def test_flags_that_contradict_the_launch_are_named(text: str, flag: str) -> None:
    with pytest.raises(FlagError, match="4 processes") as caught:
        find_distribution(read(text), RANK_1_OF_4, cpu)
    assert caught.value.flag == flag
    assert str(caught.value).startswith(f"{flag} {text[-1]}: ")


@pytest.mark.parametrize(
    ("text", "own", "whole"),
    [
        ("--use_horovod", 8, 32),
        ("", 8, 32),
        ("--distribution_strategy multi_worker", 2, 8),
        ("--use_horovod --global_batch_size 64", 16, 64),
    ],
)
def test_the_batch_is_of_one_process_with_horovod_and_of_all_with_a_strategy(text: str, own: int, whole: int) -> None:
    flags = read(text)
    assert share_batch(flags, 8, 4) == whole == 4 * own
    train_config = make_train_config(make_config(flags, 8), Distribution(RankInfo(size=4)))
    assert (train_config.own_batch, train_config.global_batch) == (own, whole)


def test_a_batch_that_cannot_be_shared_is_an_error() -> None:
    for text, batch_size, flag in (
        ("-ds mirrored", 10, "--batch_size"),
        ("--use_horovod --global_batch_size 10", 8, "--global_batch_size"),
    ):
        with pytest.raises(FlagError, match=f"{flag} 10: .* a multiple of 4") as caught:
            share_batch(read(text), batch_size, 4)
        assert caught.value.flag == flag


def test_plans_follow_the_global_batch() -> None:
    config = ssd_config.SSDConfig(data=ssd_config.DataFlags(batch_size=128), distribution=read("--use_horovod"))
    plan = make_plan(config, 117266, 8)
    assert (plan.global_batch, plan.own_batch, plan.workers, plan.steps_per_epoch) == (1024, 128, 8, 115)
    assert plan.peak_learning_rate == pytest.approx(0.096)
    assert plan.drop_steps == (4600, 5750)
    assert count_workers(read("--use_horovod --hvd_workers 8"), {}, cpu) == 8
    assert count_workers(read("--use_horovod"), RANK_1_OF_4, cpu) == 4
    assert count_workers(read("-ds multi_worker --worker_hosts a:1,b:1 --task_index 0"), {}, cpu) == 2
    assert count_workers(read(""), {}, cpu) == 1
    assert count_workers(read("--use_horovod --num_workers_per_hls 8"), {}, cpu) == 8
    assert count_workers(read("--use_horovod --num_workers_per_hls 8"), RANK_1_OF_4, cpu) == 4
    two_hosts = {"MULTI_HLS_IPS": "10.0.0.1,10.0.0.2"}
    assert count_workers(read("-ds hpu --num_workers_per_hls 4"), two_hosts, cpu) == 8
    assert count_workers(read("--use_horovod"), two_hosts, cpu) == 16
    assert count_workers(read(""), two_hosts, cpu) == 1


def make_config(flags: DistributionFlags, batch_size: int, **training: Any) -> ResNetConfig:
    from gaudi_apps.classification.flags import DataFlags
    from gaudi_apps.resnet_train import TrainingFlags

    return ResNetConfig(data=DataFlags(batch_size=batch_size), training=TrainingFlags(**training), distribution=flags)


def test_the_rate_of_lars_is_another_one_on_several_devices() -> None:
    config = make_config(read("--use_horovod"), 256, optimizer="LARS")
    assert make_train_config(config).rate.peak == 2.5
    assert make_train_config(config, Distribution(RankInfo(size=8))).rate.peak == 9.5


def test_modes_of_one_process_are_not_for_several(
    ssd_train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    done = ssd_train("--mode", "verify-resume", "--use_fake_data", "--use_horovod", "--steps", 5)
    assert done.status == 64
    assert done.error.flag == "--mode"
    assert "for one process" in done.err
    done = ssd_train("--use_fake_data", "--use_horovod", "--model_dir", tmp_path)
    assert done.status == 64
    assert "gaudi-run --np N" in done.err
    done = ssd_train("--mode", "plan", "--num_examples_per_epoch", 117266, "--use_horovod", "--hvd_workers", 8)
    assert "1024, 128 on each of 8 " in done.out
    for name, value in RANK_1_OF_4.items():
        monkeypatch.setenv(name, value)
    done = ssd_train("--use_fake_data", "--model_dir", tmp_path)
    assert done.status == 78
    assert "process 1 of 4" in done.err
    monkeypatch.setenv("GAUDI_RUN_ENGINE", "horovod")
    done = ssd_train("--mode", "plan", "--num_examples_per_epoch", 117266, "--distributed_bn", "--batch_size", 8)
    assert "32, 8 on each of 4 " in done.out
