"""`gaudi-run doctor`: what a machine has and what a run would meet. It reads, and changes nothing.

Each module gathers facts, from files below a root that tests choose, and judges them by rules that are pure functions.
"""
