"""What tests share: made runs and models, ranks, the test cluster, node-local file systems."""

from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
"""The root of the repository."""
