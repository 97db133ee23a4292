"""When memory that is free is given back."""

from __future__ import annotations

import pytest

from slurmft.train.engine import cpu
from slurmft.train.engine.cpu import KEEPS, Heap


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the process seems to take: its last number, in MiB."""
    mib = [1000]
    monkeypatch.setattr(cpu, "resident_bytes", lambda: mib[-1] << 20)
    return mib


def test_what_gathers_is_given_back(resident: list[int]) -> None:
    trims: list[int] = []
    of = Heap({KEEPS: "1099511627776"}, lambda: trims.append(resident[-1]))
    for batch in range(100):
        resident.append(1000 + 20 * batch)
        of.after_batch()
        if trims:
            break
    assert trims == [1500]  # 1.3 times what it was after 8 batches, 1,140
    for _ in range(7):  # what the next batches need, is needed
        resident.append(3000)
        of.after_batch()
    assert len(trims) == 1
    for _ in range(50):
        of.after_batch()
    assert len(trims) == 1
    resident.append(4000)
    of.after_batch()
    assert trims == [1500, 4000]


@pytest.mark.parametrize("environment", [{}, {KEEPS: ""}])
def test_heap_that_gives_back_by_itself(
    environment: dict[str, str], resident: list[int]
) -> None:
    trims: list[int] = []
    of = Heap(environment, lambda: trims.append(1))
    for batch in range(50):
        resident.append(1000 * batch)
        of.after_batch()
    assert not trims


def test_glibc_is_asked() -> None:
    """The library's own function, on the real heap."""
    trim = cpu.glibc_trim()
    assert trim is not None
    trim()
    assert cpu.resident_bytes() > 2**20
