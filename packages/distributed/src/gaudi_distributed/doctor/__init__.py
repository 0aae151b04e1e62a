"""Check a machine for a run, as `gaudi-run doctor`; nothing is changed.

Each module gathers data, from files below a root that tests choose, and checks them by pure functions.
"""
