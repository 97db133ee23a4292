"""Signals that end a command: each is taken as Ctrl-C is, by an exception, so that one way out
leads through whatever the command has begun.

A terminal that closes sends SIGHUP and Ctrl-\\ SIGQUIT; `timeout`, systemd and schedulers send
SIGTERM, or what they were told to. None of them is meant for a job: see `cluster.local.start`.
"""

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Those besides SIGINT, which Python itself takes so."""


class Interruption(KeyboardInterrupt):
    """A signal other than Ctrl-C's that ends this command."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """Returns the signal that an interruption came by."""
    if isinstance(interrupt, Interruption):
        return signal.Signals(interrupt.number)
    return signal.SIGINT


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Returns the exit code of an interrupted command, as a shell counts a death by the signal."""
    return 128 + signal_of(interrupt)


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """Raises `Interruption` in the block where one of `SIGNALS` comes."""
    with _handled(SIGNALS, _raise):
        yield


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Lets Ctrl-C and `SIGNALS` wait for the end of the block, and raises there: none of them may
    come between a submission and the record of its job."""
    numbers: list[int] = []
    with _handled((signal.SIGINT, *SIGNALS), lambda number, _: numbers.append(number)):
        yield
    # The first: `timeout` sends a second one where the first has not helped.
    if numbers and numbers[0] == signal.SIGINT:
        raise KeyboardInterrupt
    if numbers:
        raise Interruption(numbers[0])


def _raise(number: int, frame: Any) -> None:
    raise Interruption(number)


@contextlib.contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: Any) -> Iterator[None]:
    """Gives signals a handler in the block."""
    # In another thread Python sets no handlers: whoever calls a command there handles signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in numbers:
        # What nohup has made this process ignore stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
