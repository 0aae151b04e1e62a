"""Start the framework of a process, and compute with other ranks: threads, sessions, process groups, failures."""
