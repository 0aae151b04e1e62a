"""The commands of the program `gaudi-datasets`, a module each; their flags import nothing heavy."""
