from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps import ssd_mxnet_train
from gaudi_apps.mxnet.application import input_options, make_settings, open_training_data
from gaudi_apps.mxnet.config import SSDMXNetConfig
from gaudi_apps.mxnet.plan import make_plan
from gaudi_apps.runtime.settings import Distribution
from gaudi_datasets.detection.batches import train_batches
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import FlagError
from gaudi_datasets.flags import parse_flags


def test_values_are_taken_in_any_case_and_flags_with_hyphens() -> None:
    words = ["--mode", "TRAIN", "--data-layout", "nhwc", "--Precision".lower(), "FP16", "--val_epochs", "1", "2"]
    config = parse_flags(SSDMXNetConfig, words, prog="ssd_mxnet_train")
    assert (config.run.mode, config.device.data_layout, config.device.precision) == ("train", "NHWC", "fp16")
    assert config.report.val_epochs == (1, 2)


@pytest.mark.parametrize(
    ("flags", "subject", "named"),
    [
        (["--mode", "trian"], "trian", "train_val, train, eval"),
        (["--batch-sice", "2"], "unknown flag --batch-sice", "did you mean"),
        (["--epochs", "0"], "--epochs 0:", "in 1..1e+06"),
        (["--lr", "-1"], "--lr -1:", "above 0"),
        (["--weight-decay", "nan"], "--weight-decay nan:", "finite"),
        (["--target-map", "101"], "--target-map 101:", "in 0..100"),
        (["--val-epochs", "5", "3"], "--val-epochs 5 3:", "in rising order"),
        (["--lr-decay-epochs", "0", "3"], "--lr-decay-epochs 0 3:", "at least 1"),
        (["--use-tfrecord"], "--use-tfrecord:", "give --data_dir"),
        (["--synthetic"], "--coco-root and --synthetic:", "contradict"),
        (["--mode", "predict"], "--mode predict:", "--inference"),
        (["--mode"], "'--mode'", "Expected 1"),
        (["--inference", "a.jpg"], "--inference a.jpg:", "--mode predict"),
        (["--json"], "--json:", "--mode plan"),
        (["--checkpoint", "best"], "--checkpoint best:", "--mode eval, predict"),
        (["--mode", "val", "--checkpoint", "last"], "--checkpoint last:", "newest, best, all"),
        (["--mode", "val", "--dry_run"], "--dry_run:", "mode is eval"),
        (["--clean", "--dry_run"], "--clean:", "--dry_run"),
        (["--mode", "val", "--submission"], "--submission:", "--mode train"),
        (["--submission", "--system", "C4140"], "--system C4140:", "--submission"),
        (["--profile-start", "3"], "--profile-start and --profile_stop:", "both or none"),
        (["--profile-start", "3", "--profile-stop", "2"], "--profile-stop 2:", "smaller one first"),
        (["--precision", "fp32", "--fp16-loss-scale", "64"], "--fp16-loss-scale 64:", "precision is fp32"),
        (["--hvd_workers", "2"], "--hvd_workers:", "give --use_horovod"),
        (["--use_horovod"], "--use_horovod:", "no processes"),
        (["--gradient-predivide-factor", "0"], "--gradient-predivide-factor 0:", "above 0"),
        (["--bn-group", "3"], "'--bn-group'", "8"),
        (["--mlperf_org", "me"], "--mlperf_org:", "give --mlperf"),
        (["--mlperf_division", "closed"], "--mlperf_division:", "give --mlperf"),
    ],
)
def test_a_wrong_flag_is_named(ssd_mxnet_train: Callable[..., Any], flags: list[str], subject: str, named: str) -> None:
    done = ssd_mxnet_train(*flags)
    assert (done.status, done.out) == (64, "")
    assert done.err.startswith("ssd_mxnet_train: error: ")
    assert subject in done.err
    assert named in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--mode", "train", "--coco_root", "x"], ["--use_fake_data"]])
def test_a_background_validation_that_never_comes_is_told(flags: list[str]) -> None:
    """And not refused, for a submission gives it, whatever its user adds."""
    told, usual = (
        make_plan(ssd_mxnet_train.PROGRAM.parse([*flags, *more]), 320).warnings for more in (["--async_val"], [])
    )
    (warning,) = set(told) - set(usual)
    assert "--async_val" in warning


def test_a_submission_may_name_who_submits_without_the_log_that_it_writes() -> None:
    config = ssd_mxnet_train.PROGRAM.parse(["--submission", "--mlperf_org", "me"])
    assert config.mlperf.mlperf_org == "me"


def test_images_have_to_come_from_somewhere(ssd_mxnet_train: Callable[..., Any]) -> None:
    done = ssd_mxnet_train(data=False)
    assert (done.status, done.error.flag) == (64, "--mode")
    assert all(named in done.err for named in ("--mode train_val: ", "--coco_root", "--data_dir"))
    done = ssd_mxnet_train("--mode", "val", "--synthetic", data=False)
    assert (done.status, done.error.flag) == (64, "--mode")
    assert "--mode val: random images" in done.err
    assert done.err.rstrip().endswith("--synthetic")
    assert ssd_mxnet_train("--coco-root", "nowhere", data=False).status == 66


def test_hosts_that_come_and_go_are_refused(
    ssd_mxnet_train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gaudi_distributed.cluster.rendezvous import WORKER

    monkeypatch.setenv(WORKER, "0")
    done = ssd_mxnet_train()
    assert (done.status, done.error.flag) == (64, "--np")


def test_processes_for_tensorflow_are_refused(
    ssd_mxnet_train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAUDI_RUN_ENGINE", "multi_worker")
    done = ssd_mxnet_train()
    assert (done.status, done.error.flag) == (78, "--backend")


def test_training_images_are_augmented_as_flags_say(records: Path) -> None:
    def first_batch(*flags: str) -> tuple[Any, Any]:
        words = ["--data_dir", str(records), "--batch_size", "4", *flags]
        config = ssd_mxnet_train.PROGRAM.parse(words)
        settings = make_settings(config, Distribution())
        options = replace(input_options(config, settings), cache_encoded=False)
        return next(open_training_data(config, settings, "NCHW").batches(0)), options

    plain, options = first_batch()
    assert (options.zoom_in, options.zoom_out, options.mosaic) == (0.3, 1.0, 0.0)
    batch, options = first_batch("--mosaic", "1", "--zoom-out", "2", "--zoom_in", ".5")
    assert (options.zoom_in, options.zoom_out, options.mosaic) == (0.5, 2.0, 1.0)
    expected = next(train_batches(RecordSource(records, "train"), options, scale_brightness=True))
    np.testing.assert_array_equal(batch["images"], expected["images"])
    assert not np.array_equal(batch["images"], plain["images"])


@pytest.mark.parametrize("flag", ["--repeat_factor=.1", "--class_weights=balanced", "--freeze=backbone", "--data=x"])
def test_flags_of_ssd_train_alone_are_refused_by_its_name(flag: str) -> None:
    with pytest.raises(FlagError) as caught:
        ssd_mxnet_train.PROGRAM.parse(["--data_dir", "records", flag])
    name = flag.partition("=")[0]
    assert (caught.value.flag, caught.value.exit_status) == (name, 64)
    assert f"ssd_train has {name}" in str(caught.value)


def test_random_images_are_not_augmented() -> None:
    with pytest.raises(FlagError) as caught:
        ssd_mxnet_train.PROGRAM.parse(["--use_fake_data", "--mosaic", ".5"])
    assert caught.value.flag == "--mosaic"


@pytest.mark.parametrize(
    "words", [["--submission"], ["--submission", "True"], ["-submission=1"], ["--config", "c.yaml"]]
)
def test_ranks_of_a_submission_train(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("submission: true\n")
    launched: list[list[str]] = []
    monkeypatch.setattr(ssd_mxnet_train, "become_launcher", launched.append)
    program = ssd_mxnet_train.PROGRAM
    arguments = [*words, "--synthetic", "--epochs", "7"]
    program.start_ranks(program.parse(arguments), arguments)
    assert launched[0][:3] == ["--submission", "--", "ssd_mxnet_train"]
    of_rank = program.parse(launched[0][3:])
    assert (of_rank.run.submission, of_rank.run.epochs) == (False, 7)
    off = ["--submission", "False", *arguments[len(words) :]]
    program.start_ranks(program.parse(off), off)
    assert len(launched) == 1
