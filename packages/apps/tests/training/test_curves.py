from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

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
