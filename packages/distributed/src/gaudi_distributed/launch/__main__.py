"""Run `gaudi-run` as `python -m gaudi_distributed.launch`."""

from __future__ import annotations

from gaudi_distributed.launch.cli import main

if __name__ == "__main__":
    main()
