"""What the kernel asks of a program of the user's own."""

from __future__ import annotations

from typing import Any

import pytest

from slurmft.programs.kind import arguments

ODD: tuple[Any, ...] = (None, True, 5, {}, "text", [True], [None, "x"], [])


@pytest.mark.parametrize(
    ("argv", "by_name"),
    [
        (["python3", "t.py", "a", "--lr=1", "--x", "y z"],
         {"command": "t.py a", "--lr": "1", "--x": "y z"}),
        (["/bin/tool"], {"command": "tool"}),
        # A configuration may be damaged.
        *[(odd, {"command": ""}) for odd in ODD],
    ],
)  # fmt: skip
def test_arguments_of_any_configuration(argv: Any, by_name: dict[str, str]) -> None:
    assert arguments({"argv": argv}) == by_name
