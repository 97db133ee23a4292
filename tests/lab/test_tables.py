"""docs/file-locks.md shows what the labs found."""

from __future__ import annotations

from tests.lab import tables
from tests.lab.labs import LABS


def test_the_page_has_the_tables_of_all_labs() -> None:
    text = tables.PAGE.read_text()
    assert tables.page(text) == text, "python -m tests.lab renews them"
    assert {path.stem for path in tables.FOLDER.glob("*.json")} <= set(LABS)
