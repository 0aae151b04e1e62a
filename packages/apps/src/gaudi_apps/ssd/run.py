"""The modes of ssd_train that compute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_apps.ssd.config import SSDConfig

if TYPE_CHECKING:
    from gaudi_apps.ssd.session import Session


def run(config: SSDConfig) -> int:
    """Do what the validated configuration says; returns the exit status."""
    if config.run.mode == "verify-resume":
        from gaudi_apps.ssd.verify_resume import verify_resume

        return verify_resume(config)
    # Imported here: TensorFlow reads the environment when it is imported, and the session sets it first.
    from gaudi_apps.ssd.session import Session

    session = Session(config)
    modes = {"train": _train, "eval": _evaluate, "predict": _predict, "export": _export}
    modes[config.run.mode](session)
    return 0


def _train(session: Session) -> None:
    from gaudi_apps.ssd.training import run_training

    run_training(session)


def _evaluate(session: Session) -> None:
    from gaudi_apps.ssd.scoring import run_evaluation

    run_evaluation(session)


def _predict(session: Session) -> None:
    from gaudi_apps.ssd.detector import Detector
    from gaudi_apps.ssd.inputs import find_files
    from gaudi_apps.ssd.predict import PredictOptions, predict

    use = session.config.use
    files = find_files(use.inference)
    restored = session.restore(session.load_selected())
    output_dir = Path(use.output_dir or session.model_dir / "predictions")
    options = PredictOptions(session.config.data.batch_size, use.score_threshold, use.strict)
    report = predict(Detector(restored.task.model), files, restored.categories, output_dir, options)
    print(report.describe())


def _export(session: Session) -> None:
    from gaudi_apps.ssd.export import choose_pictures, run_export

    use, data = session.config.use, session.config.data
    pictures = choose_pictures(use.inference, session.open_records("val") if data.data_dir else None)
    restored = session.restore(session.load_selected())
    reports = run_export(
        restored.task.model,
        restored.categories,
        pictures,
        Path(use.output_dir or session.model_dir / "export"),
        use.export_format,
        step=restored.step,
        pool_padding=restored.pool_padding,
    )
    for report in reports:
        print(report.describe())
