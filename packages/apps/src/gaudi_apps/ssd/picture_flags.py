"""Flags of the programs that detect on pictures of the user's."""

from __future__ import annotations

from dataclasses import dataclass

from tyro.conf import FlagCreatePairsOff

Switch = FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class PictureFlags:
    """Pictures for --mode predict, and --mode export."""

    inference: tuple[str, ...] = ()
    """Pictures, videos, folders, or patterns such as 'in/*.jpg', to predict on, or to check an export on."""
    score_threshold: float = 0.3
    """Least score of a detection that is drawn and listed."""
    strict: Switch = False
    """End with the first file that cannot be read, in place of naming and skipping it."""
    output_dir: str | None = None
    """Folder of the results; predictions or export in --model_dir when not given."""
