"""Heartbeats count the steps that a device has done. A stand-in is the device."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmft.job.device_steps import DeviceSteps
from slurmft.job.job import Job
from slurmft.node import heartbeat
from slurmft.node.heartbeat import Heart


class Device:
    """torch.cuda, of a device that is told how far it comes."""

    def __init__(self) -> None:
        self.done = 0
        self.queued = 0
        device = self

        class Event:
            def record(self) -> None:
                device.queued += 1
                self.number = device.queued

            def query(self) -> bool:
                return self.number <= device.done

        self.Event = Event

    def is_initialized(self) -> bool:
        return True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=device))
    return device


def test_steps_count_when_the_device_has_done_them(device: Device) -> None:
    steps = DeviceSteps()
    assert [steps.last_done(step) for step in (1, 2, 3)] == [None, None, None]
    device.done = 2
    assert steps.last_done(4) == 2
    assert steps.last_done(5) is None
    device.done = 6
    assert steps.last_done(6) == 6


@pytest.mark.parametrize(
    "torch",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)),
    ],
)
def test_the_host_counts_where_no_device_is_used(
    torch: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert DeviceSteps().last_done(7) == 7


def test_a_device_that_hangs_gives_no_sign_of_life(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the host goes on to queue steps."""
    path = tmp_path / "beat"
    job = Job(None, heart=Heart(path))

    def last_beat(step: int) -> tuple[int, str]:
        job.step(step)
        beat = heartbeat.read(path)
        assert beat is not None
        return beat.step, beat.phase

    assert last_beat(1) == (0, "start")
    device.done = 1
    assert last_beat(2) == (1, "train")
    before = path.read_bytes()
    for step in range(3, 9):
        assert last_beat(step) == (1, "train")
    assert path.read_bytes() == before
