"""`python -m gaudi_datasets` is the program `gaudi-datasets`."""

from __future__ import annotations

from gaudi_datasets.cli import main

if __name__ == "__main__":
    main()
