"""Packages import only what stands below them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


def test_import_contracts() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [lint], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
