"""Changes to a module right after its import."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slurmft.core.after_import import AfterImport


def test_two_changes_of_one_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changed_twice.py").write_text("NAMES = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])

    def note(name: str) -> None:
        def then(module: ModuleType) -> None:
            module.__dict__["NAMES"].append(name)

        AfterImport(["changed_twice"], then)

    note("first")
    note("second")
    module = importlib.import_module("changed_twice")
    sys.modules.pop("changed_twice")
    assert module.NAMES == ["first", "second"]
