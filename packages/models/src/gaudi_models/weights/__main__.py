"""Weights of any format as safetensors: `python -m gaudi_models.weights resnet34.pth resnet34.safetensors`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from gaudi_models.padding import PADDING_RULES
from gaudi_models.weights.reading import convert_weights
from gaudi_ops.program import run_program, say

_BAD_FLAG = 64


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """Leave with the status of a bad flag."""
        say(f"{self.prog}: error: {message} (see --help)", error=True)
        self.exit(_BAD_FLAG)


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


def main() -> NoReturn:
    """Convert one file, and leave the process with its exit status."""
    parser = make_parser()
    run_program(lambda: _convert(parser), prog=parser.prog)


def _convert(parser: argparse.ArgumentParser) -> None:
    arguments = parser.parse_args()
    weights = convert_weights(arguments.source, arguments.target, padding=arguments.padding)
    say(f"{weights.source}: {len(weights.tensors)} tensors are in {arguments.target}")
    say(*(f"  {name} is not: {reason}" for name, reason in weights.skipped.items()))


if __name__ == "__main__":
    main()
