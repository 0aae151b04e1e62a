"""Measurements of speed and memory, by ratio within one run; `nox -s bench` runs them all."""
