"""The checks of results/benchmarks/references.py hold: slurmft computes what others compute."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "results" / "benchmarks"))
from comparisons.all_checks import CHECKS

ELSEWHERE = {
    # TRL is in no extra of the tests; evaluate's scripts are on its hub.
    *("chats", "trl_program", "scores_of_evaluate", "answers"),
    # tests/slurm and tests/plugins/integrations interrupt these.
    *("trainer_program", "accelerate_program", "lightning_program"),
}


def names(of_programs: bool) -> list[str]:
    chosen = []
    for name, check in CHECKS.items():
        is_program = check.section == "programs"
        if is_program == of_programs and name not in ELSEWHERE:
            chosen.append(name)
    return chosen


def assert_within_rounding(name: str, folder: Path) -> None:
    check = CHECKS[name]
    rows = list(check.compare(folder))
    assert rows
    for row in rows:
        assert row.difference <= check.limit, row


@pytest.mark.extra("training")
@pytest.mark.processes
@pytest.mark.timeout(1800)  # seconds of a quiet machine are minutes of a busy one
@pytest.mark.parametrize("name", names(of_programs=False))
def test_trainings(name: str, tmp_path: Path) -> None:
    assert_within_rounding(name, tmp_path)


@pytest.mark.extra("programs")
@pytest.mark.processes
@pytest.mark.timeout(1800)  # seconds of a quiet machine are minutes of a busy one
@pytest.mark.parametrize("name", names(of_programs=True))
def test_interrupted_programs(name: str, tmp_path: Path) -> None:
    assert_within_rounding(name, tmp_path)
