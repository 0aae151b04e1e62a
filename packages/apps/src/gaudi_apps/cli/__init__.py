"""The command line of the programs: flags, configuration files, plans, the demonstration."""
