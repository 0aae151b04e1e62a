"""Find the hosts of a run, and the rank of this process."""
