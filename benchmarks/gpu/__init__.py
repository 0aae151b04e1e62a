"""Benchmarks of one GPU: correctness against the CPU, and speed against plain Keras and PyTorch on the same card."""
