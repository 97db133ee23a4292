"""Published tables: read from files, and shown value for value."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slurmft.core.errors import UsageError
from slurmft.plugins.studies import published
from slurmft.plugins.studies.report.formats import FORMATS
from slurmft.plugins.studies.report.matching import as_published
from tests.support import CHECKOUT

PUBLISHED = CHECKOUT / "results" / "published"


@pytest.mark.parametrize("form", list(FORMATS))
@pytest.mark.parametrize("file", sorted(p.name for p in PUBLISHED.glob("*.json")))
def test_published_values_are_unchanged(file: str, form: str) -> None:
    """Every number of the file is there as the file has it, in a row with what it is of."""
    raw = json.loads((PUBLISHED / file).read_text())
    write, _ = FORMATS[form]
    text = "\n".join(
        write(as_published(table)) for table in published.load(PUBLISHED / file)
    )
    rows = [row for table in raw.get("tables", [raw]) for row in table["rows"]]
    assert rows
    for row in rows:
        shown = [re.escape(str(v)) for v in row]
        assert re.search(r"[^\n]*".join(shown), text), row


def test_published_files_of_wrong_shape(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for text in (
        "[]",
        "{}",
        '{"tables": [1]}',
        '{"tables": 1}',
        '{"columns": ["a"], "rows": [[1, 2]]}',
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match="holds no published table"):
            published.load(file)
    file.write_text('{"columns": ["a"], "rows": [[1]], "setup": "bf16"}')
    with pytest.raises(UsageError, match="its setup is 'bf16', and no object") as error:
        published.load(file)
    assert error.value.hint
