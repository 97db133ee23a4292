"""Calls that hang."""

from __future__ import annotations

import threading

from slurmft.plugins.examine.host import call_all


def test_what_hangs_is_left_behind() -> None:
    never = threading.Event()
    late, good, bad = call_all(2.0, [never.wait, lambda: True, lambda: bool(1 // 0)])
    assert isinstance(late, TimeoutError)
    assert good is True
    assert isinstance(bad, ZeroDivisionError)
    never.set()
