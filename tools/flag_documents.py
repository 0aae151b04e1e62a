"""Writes what became of the originals' flags into the documents: `python tools/flag_documents.py`.

Flags that a program does not have are declared beside its flags, with what to give in their place; the rows of the
documents that say so are made of these declarations, and a test compares them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gaudi_apps.detection.config import FORMER_FLAGS as SSD
from gaudi_apps.mxnet.config import FORMER_FLAGS as SSD_MXNET
from gaudi_apps.resnet_train import FORMER_FLAGS as RESNET
from gaudi_apps.resnext_train import FORMER_FLAGS as RESNEXT
from gaudi_datasets.arguments import FormerFlag
from gaudi_datasets.cli import (
    BENCHMARK_DATALOADER,
    CREATE_TFRECORD,
    PREPARE_JSON,
    PREPROCESS_IMAGENET,
)

ROOT = Path(__file__).resolve().parents[1]
# By document, and by heading or by the name of a list.
DOCUMENTS: Mapping[str, Mapping[str, Sequence[FormerFlag]]] = {
    "packages/apps/docs/ssd_flags.md": {"`ssd_train`": SSD},
    "packages/apps/docs/resnet_flags.md": {
        "`resnet_train`": RESNET,
        "`preprocess_imagenet.py`": PREPROCESS_IMAGENET,
        "`demo_resnet_keras.py`": RESNET,
        "`tfhub_export.py` and `transfer_learning_demo.py`": RESNET,
    },
    "packages/apps/docs/resnext_flags.md": {"`resnext_train`": RESNEXT},
    "packages/apps/docs/ssd_mxnet_flags.md": {
        "`ssd_mxnet_train`": SSD_MXNET,
        "`create_tfrecord.py`": CREATE_TFRECORD,
        "`prepare-json.py`": PREPARE_JSON,
    },
    "docs/migration.md": {
        "gone: ssd": SSD,
        "gone: resnet": RESNET,
        "gone: resnext": RESNEXT,
        "gone: ssd_mxnet": SSD_MXNET,
        "gone: imagenet": PREPROCESS_IMAGENET,
        "gone: bench": BENCHMARK_DATALOADER,
        "gone: coco": (*CREATE_TFRECORD, *PREPARE_JSON),
    },
}
_LIST = re.compile(r"(<!-- (gone: \w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# What reads as code in an answer.
_CODE = re.compile(r"(`[^`]*`)|(?<!\w)(--[\w-]+|[A-Z]+_[A-Z_]+(?:=[^\s,;]+)?|\w+\.jsonl?|\w+\.yaml)")


def render(text: str, sections: Mapping[str, Sequence[FormerFlag]]) -> str:
    """Return a document with each row, and each list, of flags that are declared as gone made anew.

    Args:
        text: the document.
        sections: the declarations, by the heading that rows stand under, or by the name of a list.
    """
    text = _LIST.sub(lambda found: found[1] + format_list(sections[found[2]]) + found[3], text)
    table: Mapping[str, FormerFlag] = {}
    lines = []
    for line in text.splitlines():
        if line.startswith("## "):
            table = {flag.name: flag for flag in sections.get(line[3:], ())}
        name = re.match(r"\| `([^`]+)` ", line)
        lines.append(line if name is None or name[1] not in table else format_row(table[name[1]]))
    return "\n".join(lines) + "\n"


def format_row(flag: FormerFlag) -> str:
    """Return the row of a flag: name, short form, default of the original, what it became, no default, answer."""
    short, became = f"`{flag.short}`" if flag.short else "", "gone" if flag.replace is None else "taken"
    cells = [f"`{flag.name}`", short, f"`{flag.default}`", became, "", describe_answer(flag)]
    return "| " + " | ".join(cells).replace("|  |", "| |").replace("|  |", "| |") + " |"


def format_list(flags: Iterable[FormerFlag]) -> str:
    """Return a table of flags with what to give in their place; equal answers stand together."""
    by_answer: dict[str, list[str]] = {}
    for flag in flags:
        names = [f"`{name}`" for name in (flag.name, flag.short) if name]
        by_answer.setdefault(describe_answer(flag), []).append(", ".join(names))
    rows = [f"| {'<br>'.join(names)} | {answer} |\n" for answer, names in by_answer.items()]
    return "\n| original | what to give |\n|---|---|\n" + "".join(rows) + "\n"


def describe_answer(flag: FormerFlag) -> str:
    """Return what to give in place of a flag, and the values that are taken."""
    meant = " or ".join(f"`{value}`" for value in flag.meant if value)
    marked = _CODE.sub(lambda found: found[1] or f"`{found[2]}`", flag.answer)
    if flag.replace is not None:
        return f"{marked} (it is taken as that)"
    return marked + (f" ({meant} is taken)" if meant else "")


def main(names: Iterable[str] = tuple(DOCUMENTS)) -> None:
    """Write the documents."""
    for name in names:
        path = ROOT / name
        path.write_text(render(path.read_text(encoding="utf-8"), DOCUMENTS[name]), encoding="utf-8")
        sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
