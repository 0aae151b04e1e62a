"""What lint looks for, and what it says of each thing found.

A rule loses when a box or a picture would not reach training or evaluation: it is left out, or it ends a conversion.
The others are worth knowing and lose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """A kind of finding: its name, whether something is lost by it, and what comes of it or what to do."""

    name: str
    loses: bool
    advice: str


STRUCTURE = Rule("broken data set", True, "nothing can be read before it is fixed")
MISSING = Rule("missing picture", True, "ends a conversion; fetch it, or take it out of the annotations")
UNREADABLE = Rule("unreadable picture", True, "ends a conversion; fetch it again, or leave it out")
OTHER_SIZE = Rule("size differs from annotation", True, "ends a conversion; the boxes may be of another picture")
NO_SIZE = Rule("box of no size", True, "left out; a loss of it would be NaN; fix or remove it")
PAST_EDGE = Rule("box past the edge", True, "left out; clip it to the picture, or fix it")
REENCODED = Rule("re-encoded picture", False, "stored as RGB JPEG, with nearly the same pixels")
MISLABELLED = Rule("mislabelled picture", False, "told by its content, so nothing is lost; rename it")
ROTATED = Rule("rotated by EXIF", False, "pixels are used as stored; boxes must be of the stored picture")
DUPLICATE = Rule("duplicate picture", False, "the same file content twice; keep one")
SAME_BOX = Rule("duplicate box", False, "the same box and class twice in a picture; keep one")
OVERLAP = Rule("in both sets", False, "a score on a picture that was trained on says nothing; keep it in one set")
NO_BOX = Rule("picture without a box", False, "left out of training, kept in evaluation")
UNUSED = Rule("class without boxes", False, "cannot be learned; leave it out, or add pictures of it")

RULES = (
    STRUCTURE, MISSING, UNREADABLE, OTHER_SIZE, NO_SIZE, PAST_EDGE, REENCODED, MISLABELLED, ROTATED, DUPLICATE,
    SAME_BOX, OVERLAP, NO_BOX, UNUSED,
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing found: the rule, where (file, record, annotation), and what is there."""

    rule: Rule
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what

    def as_json(self) -> dict[str, Any]:
        """The same as values that JSON takes."""
        return {"rule": self.rule.name, "loses": self.rule.loses, "where": self.where, "what": self.what}
