"""The areas of the extra tests, and what decides which of them run."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.support import CHECKOUT


@pytest.fixture
def areas(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of .ci/areas.py."""
    monkeypatch.chdir(CHECKOUT)
    return runpy.run_path(".ci/areas.py")


def test_every_area_is_declared(areas: dict[str, Any]) -> None:
    by_file = areas["areas_of_tests"]()
    assert set().union(*by_file.values()) == set(areas["AREAS"])


def test_every_path_exists(areas: dict[str, Any]) -> None:
    paths = [path for paths in areas["AREAS"].values() for path in paths]
    for path in (*paths, *areas["EVERYWHERE"]):
        assert (CHECKOUT / path).exists(), path


@pytest.mark.parametrize(
    ("file", "area"),
    [("docs/faq.md", "docs"), ("tests/locks/test_patches.py", "patches")],
)
def test_a_change_touches_its_area(areas: dict[str, Any], file: str, area: str) -> None:
    assert areas["touched"]([file]) == {area}


def test_a_change_of_the_core_touches_all(areas: dict[str, Any]) -> None:
    everything = set(areas["AREAS"])
    assert areas["touched"](["slurmft/core/config.py"]) == everything
    assert areas["touched"]([]) == set()
    assert areas["touched"](["slurmft/api.py"]) == set()
