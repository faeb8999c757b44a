"""Measurements of speed and memory, printed as ratios from one run."""
