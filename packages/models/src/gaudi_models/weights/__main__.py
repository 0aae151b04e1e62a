"""Weights of any format as safetensors: `python -m gaudi_models.weights resnet34.pth resnet34.safetensors`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from gaudi_models.errors import MissingWeightsError, UnsafeWeightsError, WeightsError
from gaudi_models.padding import PADDING_RULES
from gaudi_models.weights.reading import convert_weights

_BAD_FLAG, _IO = 64, 74


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """Leave with the status of a bad flag."""
        self.exit(_BAD_FLAG, f"{self.prog}: error: {message} (see --help)\n")


class _FormerSwitch(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Leave with the status of a bad flag."""
        parser.error(f"{self.option_strings[0]}: tensors that are left out are always listed; leave it out")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    parser = _Parser(prog="python -m gaudi_models.weights", description=__doc__)
    parser.add_argument("source", type=Path, help="PyTorch, pickle of arrays, .npz, .h5, checkpoint or safetensors")
    parser.add_argument("target", type=Path, help="the safetensors file to write")
    # Of torch_to_numpy.py in the MXNet submission, which this program replaces.
    parser.add_argument("--verbose", action=_FormerSwitch, nargs=0, help=argparse.SUPPRESS)
    parser.add_argument("--padding", choices=PADDING_RULES, help="of the network, where the file does not tell")
    return parser


def main() -> int:
    """Convert one file, and return the exit status."""
    try:
        return _convert()
    finally:
        _flush_output()


def _flush_output() -> None:
    """Flush standard output; drop the rest if its reader has closed it, as `head` does."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _convert() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    try:
        weights = convert_weights(arguments.source, arguments.target, padding=arguments.padding)
    except (WeightsError, MissingWeightsError, UnsafeWeightsError) as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return error.exit_status
    except OSError as error:
        sys.stderr.write(f"{parser.prog}: error: {error.filename or arguments.target}: {error.strerror}\n")
        return _IO
    lines = [f"{weights.source}: {len(weights.tensors)} tensors are in {arguments.target}"]
    lines += [f"  {name} is not: {reason}" for name, reason in weights.skipped.items()]
    with contextlib.suppress(BrokenPipeError):  # the file is written already
        sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
