"""Start a program as several ranks, on this machine or on others, by the program `gaudi-run`."""
