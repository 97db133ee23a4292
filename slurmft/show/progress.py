"""The progress of a run as it comes: one live bar on a terminal, plain lines elsewhere.

Drawn from the run's records, so that rank 0 on a compute node and a follower on the login node
show the same.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any, TextIO

from slurmft.core.terminal import plain, raw
from slurmft.core.text import duration, number

Record = dict[str, Any]


class Progress:
    """Shows the records of a run as they come, on a terminal as a bar, elsewhere as lines."""

    def __init__(
        self, stream: TextIO | None = None, live: bool | None = None, only_bar: bool = False
    ) -> None:
        self.only_bar = only_bar
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty() if live is None else live
        self._bar: Any = None

    def show(self, record: Record) -> None:
        """Shows one record; events that it does not know are left out."""
        event = record.get("event")
        if event == "start":
            self.say(describe_start(record))
            self._open_bar(int(record["total_steps"]))
        elif event == "step" and "samples_per_s" in record:
            self._show_step(record)
        elif event == "evaluate":
            if self._bar is not None:
                at = f"{record['done']:d}/{record['total']:d}"
                self._bar.set_postfix_str(f"evaluating {at} samples")
        elif text := describe(record):
            self.say(text)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.only_bar:
            return
        if self._bar is not None:
            self._bar.write(plain(text), file=raw(self._stream))
        else:
            print(plain(text), file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _open_bar(self, total: int) -> None:
        if self._live:
            from tqdm import tqdm

            self.close()
            file = raw(self._stream)
            self._bar = tqdm(total=total, desc="train", unit="step", file=file, leave=False)

    def _show_step(self, record: Record) -> None:
        if self._bar is None and self._live and record.get("total_steps"):  # of a user's program
            self._open_bar(record["total_steps"])
        if self._bar is not None:
            if "epoch" in record:
                self._bar.set_description(f"epoch {record['epoch']:.2f}")
            loss = f"loss {number(record['loss'])}, " if "loss" in record else ""
            self._bar.set_postfix_str(f"{loss}{record['samples_per_s']:.0f} samples/s")
            self._bar.update(record["step"] - self._bar.n)
        elif not self._live:
            self.say(describe_step(record))


UNLIKE = (LookupError, TypeError, ValueError, ArithmeticError)
"""What comes of a record that lacks a value, or has one of another type."""


def describe_start(r: Record) -> str:
    with contextlib.suppress(*UNLIKE):
        what = (
            f"{r['task']} on {r['world_size']:d} process(es), {r['nodes']:d} node(s): "
            f"{r['precision']}, {r['backend']}, global batch {batch(r)}, {r['total_steps']} steps, "
            f"{parameters(r)}{vocabulary(r)}"
        )
        took = [f"imports took {imports(r)}"] if r.get("imports_s") else []
        return "\n".join([*r.get("data", ()), what, *took])
    return f"{r['total_steps']} steps"


def batch(r: Record) -> str:
    """Samples of a step; where it was to have more, that, too."""
    more = f" (not {r['limited_from']}: --max-global-batch-size)" if r.get("limited_from") else ""
    return f"{r['global_batch_size']}{more}"


def parameters(r: Record) -> str:
    """Of the model; and how many of them train, where not all do."""
    total: float = r["parameters"] / 1e6
    trained: float = (r.get("trained_parameters") or r["parameters"]) / 1e6
    part = f"{trained:.2f}M of " if trained < total else ""
    return f"{part}{total:.1f}M parameters" + (
        f" train ({100 * trained / total:.1f} %)" if part else ""
    )


def vocabulary(r: Record) -> str:
    rows = r.get("vocabulary")
    return f", {rows['used']:,} of {rows['all']:,} tokens in use" if rows else ""


def imports(r: Record) -> str:
    """How long the ranks' imports took: of one node, or of several."""
    seconds = r["imports_s"]
    if r["nodes"] == 1:
        return f"{seconds['max']:.1f} s"
    return (
        f"{seconds['min']:.1f} to {seconds['max']:.1f} s a node, median {seconds['median']:.1f} s; "
        f"the slowest: {seconds['slowest']}"
    )


def describe_step(r: Record) -> str:
    parts = [
        f"epoch {r['epoch']:.2f}" if "epoch" in r else "",
        f"step {r['step']}" + (f"/{r['total_steps']}" if "total_steps" in r else ""),
        f"loss {number(r['loss'])}" if "loss" in r else "",
        f"{r['samples_per_s']:.0f} samples/s",
        f"{duration(r['left_s'])} left" if "left_s" in r else "",
    ]
    return "  ".join(filter(None, parts))


def metrics_words(metrics: dict[str, Any] | None) -> str:
    """ "accuracy 0.9123  f1 0.8870" """
    return "  ".join(f"{name} {number(value)}" for name, value in (metrics or {}).items())


def describe_epoch(r: Record) -> str:
    after = f"after step {r['step']}" if "step" in r else "evaluation"
    epoch = float(r.get("epoch", 0))
    when = f"epoch {epoch:g} done" if epoch.is_integer() and epoch else after
    when += f" (epoch {epoch:.2f})" if not epoch.is_integer() else ""
    loss = f"loss {number(r['loss'])}" if "loss" in r else ""
    return f"{when}: " + "  ".join(filter(None, [loss, metrics_words(r["metrics"])]))


_DESCRIBED: dict[str, Callable[[Record], str]] = {
    "epoch": describe_epoch,
    "early_stop": lambda r: (
        f"early stopping after step {r['step']}: {r['evaluations']} evaluation(s) without a better "
        f"{r['metric']}"
    ),
    "resume": lambda r: "\n  changed: ".join(
        (f"resumes after step {r['step']} (from {r['checkpoint']})", *r.get("changes", ()))
    ),
    "stopping": lambda r: f"stopping after step {r['step']}: {r['reason']}",
    "warning": lambda r: f"warning: {r['text']}",
    "preflight": lambda r: f"preflight: {r['text']}",
}


def describe(record: Record) -> str | None:
    """An event in words; None for one that is shown in another way, or not at all."""
    event = str(record.get("event"))
    return _DESCRIBED[event](record) if event in _DESCRIBED else None
