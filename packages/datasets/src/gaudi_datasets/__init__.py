"""Detection data sets: checked, converted, read, augmented and scored.

Each part is a module of its own (`gaudi_datasets.detection.coco`, `.detection.records`, ...), so that importing
the package costs nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"
