"""Strategies of hypothesis that change a good input in its structure: values of JSON, chunks of files, bytes."""

from __future__ import annotations

import copy
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st

# What a reader that trusts its input falls over.
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", " ", "a", "\0", "\ud800", "\x1b[2J", "../../x", "/etc/passwd", "a" * 3000, "é\u202e", "1e5", "nan", "12"),
    *([], {}, [[]], [None], {"": None}, [1, 2, 3, 4], [1e300] * 4, [-1, -1, 0, 0], ["a"] * 4, {"a": {"b": {}}}),
)
ODD_NUMBERS = (0, 1, -1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
ODD_TEXTS = (
    *(
        "",
        " ",
        "\n",
        "\t",
        "\0",
        "\x1b[31m",
        "nan",
        "inf",
        "-1",
        "1e309",
        "9" * 400,
        "é",
        "\ufeff",
        "&a",
        "*a",
        "!!x y",
    ),
    *(
        "[" * 300,
        "{" * 300,
        "- " * 200,
        "2020-01-01",
        "0x10",
        "1_000",
        ":",
        "#",
        "%",
        "\\",
        '"',
        "<",
        "&lt;",
        "a: b: c",
    ),
)


def list_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values within a JSON value, as the keys that lead there."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from list_places(each, (*place, key))


# Where these texts stand, `dump_json` writes so many lists in lists: no strategy goes down into them.
DEEP = {f"\0deep {levels}": levels for levels in (50, 900, 50_000)}


@st.composite
def change_json(draw: st.DrawFn, value: Any) -> Any:
    """Change a JSON value at one to three places: replace, remove, double, move or rename."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(list_places(value))))
        kinds = tuple(DEEP) if draw(st.integers(0, 9)) == 0 else ODD_VALUES
        odd = copy.deepcopy(draw(st.sampled_from(kinds)))
        if not place:
            if draw(st.integers(0, 9)) == 0:
                value = odd
            continue
        parent = value
        for key in place[:-1]:
            parent = parent[key]
        kind, key = draw(st.sampled_from(("replace", "replace", "remove", "double", "rename", "swap"))), place[-1]
        if kind == "remove":
            del parent[key]
        elif kind == "double" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif kind == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(("", "x", "__proto__", f"{key} ", "é")))] = parent.pop(key)
        elif kind == "swap" and isinstance(parent, list):
            parent.reverse()
        else:
            parent[key] = odd
    return value


@st.composite
def change_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Change bytes at one to four places: flip, cut, repeat, remove, fill, or write an odd number or text."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        size = len(changed)
        # Headers are at the begin and at the end.
        last = max(size - 1, 0)
        at = draw(st.one_of(st.integers(0, last), st.integers(0, min(64, last)), st.integers(max(last - 64, 0), last)))
        kind = draw(st.sampled_from(("flip", "flip", "cut", "repeat", "remove", "fill", "number", "text")))
        length = draw(st.sampled_from((1, 2, 4, 8, 16, 100)))
        if kind == "flip" and size:
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del changed[at:]
        elif kind == "repeat":
            changed[at:at] = changed[at : at + length] * draw(st.sampled_from((1, 3, 200)))
        elif kind == "remove":
            del changed[at : at + length]
        elif kind == "fill":
            changed[at : at + length] = bytes([draw(st.sampled_from((0, 0xFF)))]) * length
        elif kind == "number":
            width = draw(st.sampled_from((1, 2, 4, 8)))
            order = draw(st.sampled_from(("little", "big")))
            number = draw(st.sampled_from(ODD_NUMBERS)) % 2 ** (8 * width)
            changed[at : at + width] = number.to_bytes(width, order)
        else:
            changed[at : at + length] = draw(st.sampled_from(ODD_TEXTS)).encode("utf-8", "surrogatepass")
    return bytes(changed)


@st.composite
def change_lines(draw: st.DrawFn, text: str) -> bytes:
    """Change words of one to three lines, or lines: replace, remove, double, swap."""
    lines = [line.split(" ") for line in text.split("\n")]
    for _ in range(draw(st.integers(1, 3))):
        row = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(("replace", "replace", "remove", "double", "drop", "swap")))
        word = draw(st.integers(0, max(len(lines[row]) - 1, 0)))
        if kind == "replace" and lines[row]:
            lines[row][word] = draw(st.sampled_from(ODD_TEXTS))
        elif kind == "remove" and lines[row]:
            del lines[row][word]
        elif kind == "double":
            lines.insert(row, list(lines[row]))
        elif kind == "drop" and len(lines) > 1:
            del lines[row]
        else:
            lines[row].reverse()
    return "\n".join(" ".join(line) for line in lines).encode("utf-8", "surrogatepass")


def list_odd(value: Any) -> list[Any]:
    """List odd values of the type of a value, which a check of types takes."""
    if type(value) in (int, float):
        return [odd for odd in (*ODD_VALUES, 255, 256, -2, 1e9, 1e10) if type(odd) in (int, float)]
    return [odd for odd in (*ODD_VALUES, True, False, [], {}) if type(odd) is type(value)]


@st.composite
def change_values(draw: st.DrawFn, value: Any) -> Any:
    """Change one or two values of a JSON value to odd ones of the same types; all else stays as it must be."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        places = [place for place in list_places(value) if place]
        parent, place = value, draw(st.sampled_from(places))
        for key in place[:-1]:
            parent = parent[key]
        if odd := list_odd(parent[place[-1]]):
            parent[place[-1]] = copy.deepcopy(draw(st.sampled_from(odd)))
    return value


def dump_json(value: Any) -> bytes:
    """Write a changed JSON value, NaN and surrogates as other programs do, and lists deeper than Python writes them."""
    return deepen(json.dumps(value).encode())


def deepen(content: bytes) -> bytes:
    """Put lists in lists where one of `DEEP` stands in JSON."""
    for text, levels in DEEP.items():
        content = content.replace(json.dumps(text).encode(), b"[" * levels + b"]" * levels)
    return content


def of_json(value: Any) -> st.SearchStrategy[bytes]:
    """Change a JSON document in its structure, and sometimes in its bytes."""
    changed, odd = change_json(value).map(dump_json), change_values(value).map(dump_json)
    return st.one_of(changed, changed, odd, change_bytes(json.dumps(value).encode()))


def of_text(text: str) -> st.SearchStrategy[bytes]:
    """Change a text by its lines and words, and sometimes in its bytes."""
    return st.one_of(change_lines(text), change_lines(text), change_bytes(text.encode()))


def split_png(content: bytes) -> list[tuple[bytes, bytes]]:
    """Return kind and data of each chunk of a PNG."""
    place, chunks = 8, []
    while place < len(content):
        (length,) = struct.unpack_from(">I", content, place)
        chunks.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + length]))
        place += 12 + length
    return chunks


@st.composite
def change_png(draw: st.DrawFn, content: bytes) -> bytes:
    """Change the chunks of a PNG, whose lengths and checksums are right again."""
    chunks = split_png(content)
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, max(len(chunks) - 1, 0)))
        kind = draw(st.sampled_from(("data", "data", "remove", "double", "add")))
        if kind == "data" and chunks:
            chunks[at] = (chunks[at][0], draw(change_bytes(chunks[at][1])))
        elif kind == "remove" and chunks:
            del chunks[at]
        elif kind == "double" and chunks:
            chunks.insert(at, chunks[at])
        else:
            bomb = b"a\0\0" + zlib.compress(bytes(draw(st.sampled_from((100, 20_000_000)))))
            name = draw(st.sampled_from((b"zTXt", b"iTXt", b"iCCP", b"eXIf", b"tRNS", b"acTL", b"gAMA", b"PLTE")))
            chunks.insert(min(at, 1), (name, bomb))
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return content[:8] + b"".join(parts)


@st.composite
def change_jpeg(draw: st.DrawFn, content: bytes) -> bytes:
    """Change the segments of a JPEG, whose lengths are right again."""
    place, segments = 2, []
    while content[place] == 0xFF and content[place + 1] != 0xDA:
        (length,) = struct.unpack_from(">H", content, place + 2)
        segments.append((content[place + 1], content[place + 4 : place + 2 + length]))
        place += 2 + length
    rest = content[place:]
    at = draw(st.integers(0, len(segments) - 1))
    kind = draw(st.sampled_from(("data", "data", "remove", "double", "add", "scan")))
    if kind == "data":
        segments[at] = (segments[at][0], draw(change_bytes(segments[at][1]))[:65000])
    elif kind == "remove":
        del segments[at]
    elif kind == "double":
        segments.insert(at, segments[at])
    elif kind == "add":
        marker = draw(st.sampled_from((0xE0, 0xE1, 0xE2, 0xED, 0xEE, 0xFE, 0xC4, 0xDB, 0xDD, 0xC0, 0xC2)))
        segments.insert(at, (marker, draw(st.binary(max_size=40))))
    else:
        rest = draw(change_bytes(rest))
    return content[:2] + b"".join(struct.pack(">BBH", 0xFF, k, len(d) + 2) + d for k, d in segments) + rest


@st.composite
def change_safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    """Change the header of a safetensors file, whose length is right again, or its bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(change_bytes(content))
    (length,) = struct.unpack_from("<Q", content)
    header = dump_json(draw(change_json(json.loads(content[8 : 8 + length]))))
    return struct.pack("<Q", len(header)) + header + content[8 + length :]
