"""What a rank imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import sys
from slurmft.train import rank
rank.prepare()
assert "scipy.optimize" not in sys.modules
from transformers.loss import loss_for_object_detection
rows, columns = loss_for_object_detection.linear_sum_assignment([[4, 1], [2, 3]])
assert (list(rows), list(columns)) == ([0, 1], [1, 0])
import scipy.optimize
assert loss_for_object_detection.linear_sum_assignment is not scipy.optimize
"""


def test_optimize_is_imported_when_it_is_called() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)
