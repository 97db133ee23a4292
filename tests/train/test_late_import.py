"""Functions whose module is imported when they are called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.train.late_import import on_first_call


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_late_module.py").write_text("def double(n, plus=0):\n    return 2 * n + plus\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_late_module", raising=False)
    return "a_late_module"


def test_a_function_imports_its_module_when_it_is_called(module: str) -> None:
    with on_first_call(module):
        from a_late_module import double  # type: ignore[import-not-found]
    assert module not in sys.modules
    assert double(3, plus=1) == 7
    assert sys.modules[module].__file__


def test_a_module_that_is_there_is_used(module: str) -> None:
    import a_late_module

    with on_first_call(module):
        from a_late_module import double
    assert double is a_late_module.double
    assert sys.modules[module] is a_late_module


def test_an_error_leaves_no_stand_in(module: str) -> None:
    with pytest.raises(ValueError, match="x"), on_first_call(module):
        raise ValueError("x")
    assert module not in sys.modules


CODE = """
import sys
from slurmft.train import rank
rank.prepare()
print("scipy.optimize" in sys.modules)
from transformers.loss.loss_rt_detr import linear_sum_assignment
print(linear_sum_assignment([[1, 0], [0, 1]])[1].tolist())
import scipy.optimize
print(scipy.optimize.linear_sum_assignment is sys.modules["scipy.optimize"].linear_sum_assignment)
print(round(scipy.optimize.brentq(lambda x: x - 2, 0, 5)))
"""


def test_transformers_without_scipy_optimize_until_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split("\n")[:4] == ["False", "[1, 0]", "True", "2"]
