"""The progress of a run as it comes: one live bar on a terminal, plain lines elsewhere.

Drawn from the run's records, so that rank 0 on a compute node and a follower on the login node
show the same.
"""

import contextlib
import sys
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
        """Shows one record; unknown events are left out."""
        event = record.get("event")
        if event == "start":
            self.say(describe_start(record))
            self._open_bar(int(record["total_steps"]))
        elif event == "step" and "samples_per_s" in record:
            self._show_step(record)
        elif event == "evaluate":
            if self._bar is not None:
                part = f"{record['done']:d}/{record['total']:d}"
                self._bar.set_postfix_str(f"evaluating {part} samples")
        else:
            text = describe(record)
            if text:
                self.say(text)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self.only_bar:
            return
        if self._bar is not None:
            # tqdm takes the bar away, writes, and draws it anew. It moves the cursor by escape
            # sequences, which only the raw stream lets through.
            self._bar.write(plain(text), file=raw(self._stream))
        else:
            print(plain(text), file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _open_bar(self, total: int) -> None:
        if self._live:
            from tqdm import tqdm  # not above: commands without a bar need not wait for it

            self.close()
            file = raw(self._stream)
            self._bar = tqdm(total=total, desc="train", unit="step", file=file, leave=False)

    def _show_step(self, record: Record) -> None:
        # A program of the user's own may record no start: its first step opens the bar.
        if self._bar is None and self._live and record.get("total_steps"):
            self._open_bar(record["total_steps"])
        if self._bar is None:
            if not self._live:
                self.say(describe_step(record))
            return
        if "epoch" in record:
            self._bar.set_description(f"epoch {record['epoch']:.2f}")
        parts = []
        if "loss" in record:
            parts.append(f"loss {number(record['loss'])}")
        parts.append(f"{record['samples_per_s']:.0f} samples/s")
        self._bar.set_postfix_str(", ".join(parts))
        # tqdm counts on: it wants the difference, which is negative after a resume.
        self._bar.update(record["step"] - self._bar.n)


UNLIKE = (LookupError, TypeError, ValueError, ArithmeticError)
"""The errors of describing a record that lacks a value, or has one of another type."""


def describe_start(record: Record) -> str:
    # The start of a user's program may have its number of steps and nothing else.
    with contextlib.suppress(*UNLIKE):
        where = f"{record['world_size']:d} process(es), {record['nodes']:d} node(s)"
        settings = [
            f"{record['precision']}",
            f"{record['backend']}",
            f"global batch {batch(record)}",
            f"{record['total_steps']} steps",
            f"{parameters(record)}{vocabulary(record)}",
        ]
        lines = [*record.get("data", ())]
        lines.append(f"{record['task']} on {where}: {', '.join(settings)}")
        if record.get("imports_s"):
            lines.append(f"imports took {imports(record)}")
        return "\n".join(lines)
    return f"{record['total_steps']} steps"


def batch(start: Record) -> str:
    """Returns the samples of a step; where it was to have more, that, too."""
    size = f"{start['global_batch_size']}"
    if start.get("limited_from"):
        size += f" (not {start['limited_from']}: --max-global-batch-size)"
    return size


def parameters(start: Record) -> str:
    """Returns the size of the model, and how much of it is trained, where not all is."""
    millions: float = start["parameters"] / 1e6
    trained_count = start.get("trained_parameters") or start["parameters"]
    trained: float = trained_count / 1e6
    if trained < millions:
        percent = 100 * trained / millions
        return f"{trained:.2f}M of {millions:.1f}M parameters train ({percent:.1f} %)"
    return f"{millions:.1f}M parameters"


def vocabulary(start: Record) -> str:
    rows = start.get("vocabulary")
    if not rows:
        return ""
    return f", {rows['used']:,} of {rows['all']:,} tokens in use"


def imports(start: Record) -> str:
    """Returns how long the imports of the ranks took, on one node or several."""
    seconds = start["imports_s"]
    if start["nodes"] == 1:
        return f"{seconds['max']:.1f} s"
    return (
        f"{seconds['min']:.1f} to {seconds['max']:.1f} s a node, median {seconds['median']:.1f} s; "
        f"the slowest: {seconds['slowest']}"
    )


def describe_step(step: Record) -> str:
    parts = []
    if "epoch" in step:
        parts.append(f"epoch {step['epoch']:.2f}")
    position = f"step {step['step']}"
    if "total_steps" in step:
        position += f"/{step['total_steps']}"
    parts.append(position)
    if "loss" in step:
        parts.append(f"loss {number(step['loss'])}")
    parts.append(f"{step['samples_per_s']:.0f} samples/s")
    if "left_s" in step:
        parts.append(f"{duration(step['left_s'])} left")
    return "  ".join(parts)


def metrics_words(metrics: dict[str, Any] | None) -> str:
    """ "accuracy 0.9123  f1 0.8870" """
    if not metrics:
        return ""
    return "  ".join(f"{name} {number(value)}" for name, value in metrics.items())


def describe_epoch(evaluation: Record) -> str:
    epoch = float(evaluation.get("epoch", 0))  # a user's program may not count epochs
    is_whole = epoch.is_integer()
    if is_whole and epoch:
        when = f"epoch {epoch:g} done"
    elif "step" in evaluation:
        when = f"after step {evaluation['step']}"
    else:
        when = "evaluation"
    if not is_whole:
        when += f" (epoch {epoch:.2f})"
    parts = []
    if "loss" in evaluation:
        parts.append(f"loss {number(evaluation['loss'])}")
    if evaluation["metrics"]:
        parts.append(metrics_words(evaluation["metrics"]))
    return f"{when}: " + "  ".join(parts)


def describe(record: Record) -> str | None:
    """Returns an event in words; None for one that is shown in another way, or not at all."""
    match record.get("event"):
        case "epoch":
            return describe_epoch(record)
        case "early_stop":
            return (
                f"early stopping after step {record['step']}: {record['evaluations']} "
                f"evaluation(s) without a better {record['metric']}"
            )
        case "resume":
            lines = [f"resumes after step {record['step']} (from {record['checkpoint']})"]
            for change in record.get("changes", ()):
                lines.append(f"  changed: {change}")
            return "\n".join(lines)
        case "stopping":
            return f"stopping after step {record['step']}: {record['reason']}"
        case "warning":
            return f"warning: {record['text']}"
        case "preflight":
            return f"preflight: {record['text']}"
        case _:
            return None
