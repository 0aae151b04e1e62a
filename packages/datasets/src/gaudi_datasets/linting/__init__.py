"""Check a data set before any training, and report as a table, JSON and an image sheet."""
