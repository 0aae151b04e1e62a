"""What a process needs to compute with others: the framework, its threads, its rank, its failures."""
