"""Training: the trainer, its callbacks, its initial state, and the checkpoints that it leaves."""
