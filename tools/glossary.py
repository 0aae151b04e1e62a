"""Find the project's former private words, for which its field has words of its own.

`python tools/glossary.py` prints each place. `tools/structure.py` counts them.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# These hold the words as data: they look for them.
EXCLUDED = ("tools/glossary.py", "tests/test_structure.py")
_CODE_SPAN = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class FormerWord:
    """Name a word that is no longer used.

    Attributes:
        pattern: a regular expression: of a part of a line for a word of prose, else of a whole identifier.
        replacement: the field's words.
        prose: also looked for in comments, strings and documents, and within identifiers.
        folder: where alone it is looked for; elsewhere it means something else.
    """

    pattern: str
    replacement: str
    prose: bool = False
    folder: str = ""


WORDS = (
    FormerWord(r"(?i)(?<![a-z])wish(es|ed|ing)?(?![a-z])|Wishes", "vote, count_votes, poll", prose=True),
    FormerWord(r"_?Beginning|_?beginning|_Start|begin_or_continue", "state, load_or_initialize"),
    # In quotes it is a field of files: of checkpoints, and of what doctor writes.
    FormerWord(r"(?<![a-z\"'])[Ff]acts(?![a-z])", "ModelConfig, RunState, metadata", prose=True),
    FormerWord(r"_?note_[a-z]\w*", "metadata", folder="packages/apps/src"),
    FormerWord(r"def \w+_of(?=\()", "a noun: class_names", prose=True, folder="packages/apps/src"),
    FormerWord(r"TrainingWatcher|watch_training|_?Hooks|Reporters", "Callback"),
    FormerWord(r"(\.|def )(look|own)\(", "validate, register_files", prose=True, folder="packages/apps"),
    FormerWord(r"(?i)_?(free|side)_flags|_?of_a_(rank|side|command)", "resume_safe, per_rank"),
    FormerWord(r"(\.|def )shorten\(", "resume_safe", prose=True, folder="packages/apps"),
    FormerWord(r"Commits|commits", "ElasticState", folder="packages/apps"),
    FormerWord(r"_?[Ss]upervised", "FailureReporter"),
    FormerWord(r"_?Member", "RankClient", folder="packages/distributed"),
    FormerWord(r"_?Keeper", "Coordinator"),
    FormerWord(r"_?[Jj]udgements?", "FailureDetector"),
    FormerWord(r"_?hear|_?declare", "on_heartbeat, abort", folder="packages/distributed"),
    FormerWord(r"_?Place|_?find_place|RankPlace", "RankInfo, detect_rank"),
    FormerWord(r"_?Cause|_?Bounds|_?Rounds|_?Seats", "FailureCause, Timeouts, Rendezvous, RankAssignment"),
    FormerWord(r"_?Numbers|_?Descent", "arguments of MXNetTask"),
    FormerWord(r"(?i)(?<![a-z])aside(?![a-z]| from)", "async_eval, in the background", prose=True),
    FormerWord(r"_?adopt\w*", "set_result"),
    FormerWord(r"_?Detects|_?Found|_?Answers", "Detector, ObjectDetections, Predictions"),
    FormerWord(r"_?Preparation|_?from_root", "Preprocessor, broadcast_from_rank0"),
    FormerWord(r"(?i)rehears", "dry run", prose=True),
    # A recipe is what --recipe chooses, and not the configuration of a training.
    FormerWord(r"(make|model|learning|rate)_recipe", "TrainConfig"),
    FormerWord(r"(?i)trunk(?!at)", "backbone", prose=True),
    FormerWord(r"topk_hits|MovingAverages|deal_positions|draw_fake_batch", "in_top_k, ExponentialMovingAverage, ..."),
    FormerWord(r"require_agreement|_?Packing", "verify_consistent, reduce_in_buckets"),
    FormerWord(r"find_boxes_shared|_?LedStep|_?Lead", "detect_combined_nms, ReferenceStep, Reference"),
    # A run's folder of drawn images is named pictures.
    FormerWord(r"(?i)picture(?!s[\"'/`])", "image", prose=True),
)


@dataclass(frozen=True)
class Hit:
    """Hold where a former word stands: path below the root, line, the text that was found, the word."""

    path: str
    line: int
    found: str
    word: FormerWord

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found}: {self.word.replacement}"


def list_sources(root: Path) -> list[Path]:
    """Return the modules and documents that are searched, in the order of their paths."""
    folders = [root, *(root / name for name in ("benchmarks", "containers", "docs", "packages", "tests", "tools"))]
    found = {
        path
        for folder in folders
        for ending in (".py", ".md")
        for path in (folder.glob(f"*{ending}") if folder == root else folder.rglob(f"*{ending}"))
    }
    hidden = ("build", "dist")
    names = {path: path.relative_to(root) for path in found}
    return sorted(
        path
        for path, name in names.items()
        if str(name) not in EXCLUDED and not any(part.startswith(".") or part in hidden for part in name.parts)
    )


def find_hits(
    root: Path, words: Iterable[FormerWord] = WORDS, parse: Callable[[str, str], ast.Module] = ast.parse
) -> Iterator[Hit]:
    """Yield each place of a former word in the modules and documents below a root; one a line and word.

    Args:
        root: of the checkout.
        words: to look for.
        parse: gives the tree of a text and its path.
    """
    patterns = [(word, re.compile(word.pattern)) for word in words]

    @functools.cache  # an identifier stands in many places
    def is_former(identifier: str) -> bool:
        return any(pattern.fullmatch(identifier) for word, pattern in patterns if not word.prose)

    for path in list_sources(root):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        tree = parse(text, str(path)) if path.suffix == ".py" else None
        lines = text.splitlines()
        identifiers = sorted({each for each in list_identifiers(text, tree) if is_former(each[1])})
        for word, pattern in patterns:
            if not name.startswith(word.folder) or (word.prose and not pattern.search(text)):
                continue
            if word.prose:
                found = {number: match[0] for number, line in enumerate(lines, 1) if (match := pattern.search(line))}
            else:
                found = {number: each for number, each in identifiers if pattern.fullmatch(each)}
            yield from (Hit(name, number, each, word) for number, each in found.items())


def list_identifiers(text: str, tree: ast.Module | None) -> Iterator[tuple[int, str]]:
    """Yield line and name of each identifier: those of code, where there is its tree, and each word in backticks."""
    for number, line in enumerate(text.splitlines(), 1):
        for span in _CODE_SPAN.findall(line):
            yield from ((number, each) for each in re.findall(r"\w+", span))
    for node in () if tree is None else walk(tree):
        yield from ((node.lineno, each) for each in name_node(node) if hasattr(node, "lineno"))


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, in any order: `ast.walk` takes twice the time."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                pending.append(value)
            elif isinstance(value, list):
                pending += (each for each in value if isinstance(each, ast.AST))


def name_node(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers that a node holds itself, not those below it."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.alias):
        yield from (*node.name.split("."), node.asname or "")
    elif isinstance(node, ast.ImportFrom):
        yield from (node.module or "").split(".")


if __name__ == "__main__":
    for hit in find_hits(ROOT):
        sys.stdout.write(f"{hit}\n")
