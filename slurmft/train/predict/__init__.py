"""Predictions of the rows of a file, as each rank makes them."""
