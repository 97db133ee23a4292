"""The scripts of results/benchmarks start, and results/README.md names what there is."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "results" / "benchmarks"))
from comparisons import table

RESULTS = CHECKOUT / "results"
REFERENCES = json.loads((RESULTS / "measured/references.json").read_text())
README = (RESULTS / "README.md").read_text()
SCRIPTS = sorted(
    path
    for path in (RESULTS / "benchmarks").iterdir()
    if path.suffix in (".py", ".sh") and path.stem not in ("harness", "gpu_models")
)
MEASURED = sorted(path for path in (RESULTS / "measured").iterdir() if path.is_file())


@pytest.mark.extra("docs")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_benchmark_says_how_it_is_used(script: Path) -> None:
    program = "bash" if script.suffix == ".sh" else sys.executable
    done = subprocess.run(
        [program, str(script), "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_the_readme_names_every_benchmark() -> None:
    for script in SCRIPTS:
        assert f"benchmarks/{script.name}" in README


def test_the_readme_names_every_measured_file_and_no_other() -> None:
    names = set(re.findall(r"`([\w*]+\.json)`", README))
    named = {path for name in names for path in (RESULTS / "measured").glob(name)}
    assert all(any((RESULTS / "measured").glob(name)) for name in names)
    assert named == {path for path in MEASURED if path.suffix == ".json"}


def test_links_of_the_readme_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (RESULTS / link).exists(), link
    for script in re.findall(r"results/benchmarks/(\w+\.\w+)", README):
        assert (RESULTS / "benchmarks" / script).exists(), script


# --- what was compared with other libraries -------------------------------------------------------


def test_the_page_shows_the_references() -> None:
    page = (CHECKOUT / "docs/tasks.md").read_text()
    assert "\n".join(table.lines(REFERENCES["checks"])) in page
    assert REFERENCES["left_out"] == []


def test_no_difference_is_larger_than_rounding() -> None:
    for check in REFERENCES["checks"].values():
        for row in check["rows"]:
            assert row["difference"] <= check["limit"], row


def test_the_largest_difference() -> None:
    assert table.largest([1.0, 2.0, 3.0], [1.0, 2.5, 2.75]) == 0.5
    with pytest.raises(AssertionError):  # max would pass over NaN
        table.largest([1.0, math.nan], [1.0, 2.0])
    with pytest.raises(ValueError, match="argument 2"):
        table.largest([1.0], [1.0, 2.0])
    assert [table.shown(value) for value in (0.0, 4.4e-8, 2)] == ["0", "4e-08", "2e+00"]
