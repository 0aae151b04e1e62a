"""The mode parity: the same first steps computed in two ways, and where the two ways part."""
