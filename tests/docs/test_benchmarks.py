"""The scripts of results/benchmarks start, and results/README.md names what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import CHECKOUT

RESULTS = CHECKOUT / "results"
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
