from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from gaudi_apps.training.reports import plot_curves, smooth


def test_curve_is_a_image_with_the_colours_of_its_lines(tmp_path: Path) -> None:
    rows = [
        {"step": step, "loss": 9 - step / 20, "class_loss": 5.0, "box_loss": 3.0, "learning_rate": 1e-3}
        for step in range(100)
    ]
    path = tmp_path / "curves.png"
    plot_curves(rows, path, title="ssd_train")
    image = cv2.imread(str(path))
    assert image.shape == (720, 1080, 3)
    for blue, green, red in ((0xB4, 0x77, 0x1F), (0x0E, 0x7F, 0xFF), (0x2C, 0xA0, 0x2C), (0x28, 0x27, 0xD6)):
        assert np.all(image == (blue, green, red), axis=2).sum() > 100
    assert [entry.name for entry in tmp_path.iterdir()] == ["curves.png"]


@pytest.mark.costly
def test_scores_are_drawn_with_a_star_at_the_best(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 9 - step / 20, "learning_rate": 1e-3} for step in range(100)]
    evaluations = [{"step": 10 * n, "AP": n * (8 - n) / 40, "AP50": n / 10} for n in range(1, 10)]
    plot_curves(rows, tmp_path / "detector.png", evaluations=evaluations)
    image = cv2.imread(str(tmp_path / "detector.png"))
    assert image.shape == (1080, 1080, 3)
    scores = image[540:830]
    star = np.argwhere(np.all(scores == (0x28, 0x27, 0xD6), axis=2))
    left = star[star[:, 1] < 900]  # without the legend
    assert abs(left[:, 1].mean() - (108 + 956 * 0.43)) < 30  # step 40 of 99
    plot_curves(rows, tmp_path / "classifier.png", evaluations=[{"step": 50, "top_1": 0.05, "top_5": float("nan")}])
    assert cv2.imread(str(tmp_path / "classifier.png")).shape == (1080, 1080, 3)
    plot_curves(rows, tmp_path / "others.png", evaluations=[{"step": 50, "loss": 0.5}])
    assert cv2.imread(str(tmp_path / "others.png")).shape == (720, 1080, 3)


def test_one_step_stands_in_the_middle(tmp_path: Path) -> None:
    plot_curves([{"step": 6}], tmp_path / "one.png", evaluations=[{"step": 6, "AP": 0.02}])
    image = cv2.imread(str(tmp_path / "one.png"))
    star = np.argwhere(np.all(image[650:830] == (0x28, 0x27, 0xD6), axis=2))
    assert abs(star[:, 1].mean() - (108 + 956 / 2)) < 30


def test_curve_of_nothing_and_of_gaps(tmp_path: Path) -> None:
    plot_curves([], tmp_path / "empty.png")
    plot_curves([{"step": 1, "loss": float("nan")}, {"step": 2}], tmp_path / "gaps.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000
    assert (tmp_path / "gaps.png").stat().st_size > 1000


def test_smooth_is_the_mean_of_the_finite_recent_values() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0, 7.0])
    np.testing.assert_allclose(smooth(values, 2), [1, 2, 3, 5, 6])
    np.testing.assert_allclose(smooth(values, 1), values)
    assert np.isnan(smooth(np.array([np.nan, np.inf]), 2)).all()
