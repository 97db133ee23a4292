"""docs/file-locks.md shows what the labs found; a lab that cannot start says why."""

from __future__ import annotations

import pytest

from tests.lab import tables
from tests.lab.hosts import LabError
from tests.lab.labs import LABS, make


def test_the_page_has_the_tables_of_all_labs() -> None:
    text = tables.PAGE.read_text()
    assert tables.page(text) == text, "python -m tests.lab renews them"
    assert {path.stem for path in tables.FOLDER.glob("*.json")} <= set(LABS)


def test_a_lab_names_the_packages_that_it_lacks() -> None:
    lab = make("moosefs")
    lab.programs = ("no-such-program",)
    with (
        pytest.raises(
            LabError, match=r"no-such-program: apt-get install -y moosefs-master "
        ),
        lab,
    ):
        pass
