"""The hosts of a run, and the rank of this process among its processes."""
