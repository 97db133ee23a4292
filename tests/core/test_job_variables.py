"""Variables of one job stay in it."""

import os
import re
from pathlib import Path

import pytest

import slurmft
from slurmft.core.job_variables import OF_JOBS, PUBLIC, outside_of_jobs


def test_every_variable_is_public_or_of_one_job() -> None:
    root = Path(slurmft.__file__).parent
    used = set()
    for path in root.rglob("*.py"):
        used |= set(re.findall(r'"(SLURMFT_[A-Z_]+)"', path.read_text()))
    used.discard("SLURMFT_")  # the beginning of all
    assert used == {*PUBLIC, *OF_JOBS}


def test_a_job_that_is_submitted_from_a_job_gets_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*PUBLIC, *OF_JOBS):
        monkeypatch.setenv(name, "of this job")
    with outside_of_jobs():
        left = {name for name in os.environ if name.startswith("SLURMFT_")}
    assert left >= set(PUBLIC)
    assert left.isdisjoint(OF_JOBS)
    for name in OF_JOBS:
        assert os.environ[name] == "of this job"
