"""The machine: which device computes, in which precision, on which processor cores."""
