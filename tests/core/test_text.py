"""Tables and texts are as wide as a terminal shows them."""

from __future__ import annotations

import re

import pytest

from slurmft.core.terminal import plain
from slurmft.core.text import (
    ScreenColumn,
    after_state,
    aligned,
    hanging,
    on_screen,
    shown,
    shown_with_end,
    width_of,
    with_reason,
)

NAMES = (
    "a",
    "run\x1b]0;title\x07",
    "r\udcffun",
    "\u202eemoc",
    "中文模型",
    "cafe\u0301",
)
"""Names of runs: plain, escaped when they are printed, wide, with an accent of its own."""


@pytest.mark.parametrize(
    ("text", "width"),
    [("abc", 3), ("é", 1), ("e\u0301", 1), ("中文", 4), ("a中", 3), ("", 0)],
)
def test_width_is_that_of_the_terminal(text: str, width: int) -> None:
    assert width_of(text) == width


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("queue 0.9 %, start 25.5 %, saves 26.3 %, waits 0.5 %", r"^%"),
        ("step-8, 3:35 min ago; 1 in all, 17.5 MiB", r"^(min|MiB)"),
        ("accuracy 0.3750  f1_macro 0.1818  loss 0.7279", r"^0"),
    ],
)
def test_a_number_and_what_belongs_to_it_stay_on_one_line(
    text: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in range(20, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = [line.strip() for line in hanging("time  ", text, 6).splitlines()]
        assert not [line for line in lines if re.search(broken, line)]
        assert " ".join(lines).split() == f"time  {text}".split()


@pytest.mark.parametrize(
    ("reason", "behind"),
    [
        ("cancelled; there is no checkpoint", "there is no checkpoint"),
        ("cancelled: by its user", "by its user"),
        ("cancelled", ""),
        ("the job 7 was cancelled", "the job 7 was cancelled"),
    ],
)
def test_a_state_does_not_stand_twice(reason: str, behind: str) -> None:
    assert after_state(reason, "cancelled") == behind
    words = with_reason("cancelled", reason)
    assert words == f"cancelled: {behind}" if behind else words == "cancelled"


def test_columns_stay_beside_names_that_are_escaped_or_wide() -> None:
    rows = [(name, "x") for name in NAMES]
    columns = [ScreenColumn("run", NAMES), ScreenColumn("job", ["x"] * len(NAMES))]
    # The head of a table on a screen is a row of its own.
    for lines in (aligned(rows), on_screen(columns)[1:]):
        printed = [plain(line) for line in lines]
        assert len({width_of(line) for line in printed}) == 1
        assert printed[1].startswith(r"run\u001b]0;title\u0007  ")


@pytest.mark.parametrize("cut", [shown, shown_with_end])
@pytest.mark.parametrize("width", range(4, 40))
def test_a_cut_text_fits(cut: object, width: int) -> None:
    assert callable(cut)
    for text in ("中文模型" * 10, "abc" * 20, "a中" * 15):
        assert width - 1 <= width_of(cut(text, width)) <= width
