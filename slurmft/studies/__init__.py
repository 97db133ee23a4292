"""Grids of runs, and what is read out of them: reports, comparisons, scaling models."""
