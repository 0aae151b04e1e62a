"""Measure how fast training gets the images of a data set, stage by stage."""
