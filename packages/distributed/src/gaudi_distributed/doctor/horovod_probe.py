"""A process that loads shared libraries, Horovod's last, and prints as JSON what that one has built in.

It is run by its path, and imports nothing but the standard library: importing a framework in place of loading its
libraries would take seconds, and Keras would write into the user's home.
"""

from __future__ import annotations

import ctypes
import json
import sys

_PARTS = {"MPI": "mpi", "Gloo": "gloo", "NCCL": "nccl", "CUDA": "cuda", "DDL": "ddl", "CCL": "ccl"}


def main() -> int:
    """Load the libraries that the arguments name, in their order; status 1 and a line where one does not load."""
    try:
        library = [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in sys.argv[1:]][-1]
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    parts = {name: bool(library[f"horovod_{part}_built"]()) for name, part in _PARTS.items()}
    sys.stdout.write(json.dumps(parts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
