"""Start a program as many ranks, on this machine or on others: the program `gaudi-run`."""
