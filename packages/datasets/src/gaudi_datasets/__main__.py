"""`python -m gaudi_datasets` is the program `gaudi-datasets`."""

from __future__ import annotations

if __name__ == "__main__":
    # Here, because the processes that a conversion starts import this module too.
    from gaudi_datasets.cli import main

    main()
