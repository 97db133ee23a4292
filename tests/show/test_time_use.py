"""Where the time went, in words and as a table."""

from __future__ import annotations

import pytest

from slurmft.cluster.time_use import in_all, key_of
from slurmft.runs.time_use import Part
from slurmft.show import time_use


def use_of(**seconds: float) -> dict[str, float]:
    return {key_of(part): seconds.get(part, 0.0) for part in Part}


def test_every_part_has_a_label() -> None:
    assert list(time_use.LABELS) == [key_of(part) for part in Part]


@pytest.mark.parametrize("seconds", [1.0, 1e-9, 7.0, 1e9])
def test_shares_add_up(seconds: float) -> None:
    """Also where each of them is rounded: thirds and sevenths."""
    thirds = time_use.shares(use_of(steps=seconds, queue=seconds, lost=seconds))
    assert thirds["steps_s"] == 33.4
    sevenths = time_use.shares(
        use_of(steps=seconds, queue=2 * seconds, waits=4 * seconds)
    )
    for found in (thirds, sevenths):
        assert sum(round(10 * percent) for percent in found.values()) == 1000


def test_words_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    first = in_all([use_of(steps=50, queue=50)])
    second = in_all([use_of(program=50, queue=150)])
    assert time_use.words(first) == "ETTR 50.0 % of 1:40 min; queue 50.0 %"
    words = "3:20 min; queue 75.0 %, program 25.0 %"
    assert time_use.words(second) == words
    assert time_use.words(in_all([])) == ""
    both = in_all([first, second])
    assert both["ettr"] is None
    head, *lines = time_use.table("run", ["a", "b", "in all"], [first, second, both])
    assert head.split() == ["run", "time", "ETTR", "queue", "program"]
    assert lines[0].split() == ["a", "1:40", "min", "50.0", "%", "50.0", "%", "-"]
    assert lines[1].split()[3:5] == ["unknown", "75.0"]
    # Some of the program's time may be steps.
    assert lines[2].split()[-7:] == ["≥", "16.7", "%", "66.6", "%", "16.7", "%"]
    assert time_use.words(both).startswith("ETTR ≥ 16.7 % of ")
    # Of known time none may be steps, which is not unknown.
    queue = in_all([use_of(queue=50)])
    assert time_use.words(queue) == "ETTR 0.0 % of 50 s; queue 100.0 %"
    _, line = time_use.table("run", ["a"], [queue])
    assert line.split() == ["a", "50", "s", "0.0", "%", "100.0", "%"]


def test_a_prediction_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no share of steps, whatever else its time went into."""
    monkeypatch.setenv("COLUMNS", "60")
    use = in_all([use_of(queue=50)])
    use["ettr"] = None
    names = [f"predict-text-classification-20261127-14{n}000" for n in range(3)]
    _, *lines = time_use.table("run", names, [use] * 3)
    assert [line.split()[3] for line in lines] == ["unknown"] * 3
    # The time of a name tells it from others on a narrow terminal, too.
    assert len({line.split()[0] for line in lines}) == 3
