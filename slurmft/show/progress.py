"""The progress of a run as it comes: one live bar on a terminal, plain lines elsewhere.

Drawn from the run's records, so that rank 0 on a compute node and a follower on the login node
show the same.
"""

import sys
from typing import Any, TextIO

from slurmft.core.run_records import (
    BestSaved,
    EarlyStop,
    Epoch,
    Evaluate,
    ImportTimes,
    Record,
    Resume,
    Start,
    Step,
    Stopping,
    Text,
    TrainingStart,
    Vocabulary,
)
from slurmft.core.terminal import plain, raw
from slurmft.core.text import counted, duration, number


class Progress:
    """Shows the records of a run as they come, on a terminal as a bar, elsewhere as lines."""

    def __init__(
        self,
        stream: TextIO | None = None,
        live: bool | None = None,
        only_bar: bool = False,
    ) -> None:
        self.only_bar = only_bar
        self._stream = stream or sys.stdout
        # A file or a pipe would keep every state of a bar.
        if live is None:
            live = self._stream.isatty()
        self._live = live
        self._bar: Any = None

    def show(self, record: Record) -> None:
        """Shows one record; unknown events are left out."""
        match record:
            case Start():
                self.say(describe_start(record))
                self._open_bar(record.total_steps)
            case Step():
                # The trainer measures the speed over a window of steps: those within one say
                # nothing new.
                if record.samples_per_s is not None:
                    self._show_step(record)
            case Evaluate():
                # On a bar alone: an evaluation has many such records, and a line for its end.
                if self._bar is not None:
                    part = f"{record.done}/{record.total}"
                    self._bar.set_postfix_str(f"evaluating {part} samples")
            case _:
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
            # At once: where stdout is a file or a pipe, Python would keep lines back.
            print(plain(text), file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _open_bar(self, total: int) -> None:
        if self._live:
            # not above: commands without a bar need not wait for it
            from tqdm import tqdm

            # A job that was started again has a start of its own, and begins a new bar.
            self.close()
            file = raw(self._stream)
            self._bar = tqdm(
                total=total,
                desc="train",
                unit="step",
                file=file,
                # At its end it goes: the table of the result takes its place.
                leave=False,
            )

    def _show_step(self, step: Step) -> None:
        # A program of the user's own may record no start: its first step opens the bar.
        if self._bar is None and self._live and step.total_steps:
            self._open_bar(step.total_steps)
        if self._bar is None:
            if not self._live:
                self.say(describe_step(step))
            return
        if step.epoch is not None:
            self._bar.set_description(f"epoch {step.epoch:.2f}")
        parts = []
        if step.loss is not None:
            parts.append(f"loss {number(step.loss)}")
        parts.append(f"{step.samples_per_s:.0f} samples/s")
        self._bar.set_postfix_str(", ".join(parts))
        # tqdm counts on: it wants the difference, which is negative after a resume.
        self._bar.update(step.step - self._bar.n)


def describe_start(start: Start) -> str:
    """Returns the start in lines. That of a user's program may have its number of steps alone."""
    if not isinstance(start, TrainingStart):
        return counted(start.total_steps, "step")
    where = f"{start.world_size} process(es), {start.nodes} node(s)"
    model = _parameters(start) + _vocabulary(start.vocabulary)
    settings = [
        start.precision,
        start.backend,
        f"global batch {_batch(start)}",
        counted(start.total_steps, "step"),
        model,
    ]
    if start.optimizer and start.learning_rate is not None:
        settings.append(
            optimizer_words(
                start.optimizer, start.learning_rate, start.optimizer_reason
            )
        )
    summary = f"{start.task} on {where}: {', '.join(settings)}"
    lines = [*start.data, summary]
    if start.best_by:
        lines.append(f"the best checkpoint is the one with the {start.best_by}")
    if start.imports_s:
        import_times = imports(start.imports_s, start.nodes)
        lines.append(f"imports took {import_times}")
    return "\n".join(lines)


def _batch(start: TrainingStart) -> str:
    """Returns the samples of a step; where it was to have more, that, too."""
    size = f"{start.global_batch_size}"
    if start.limited_from:
        size += f" (not {start.limited_from}: --max-global-batch-size)"
    if start.step_samples and start.step_samples < start.global_batch_size:
        size += f" (the data has {start.step_samples})"
    if start.batch_size:
        size += f" (--batch-size auto: {start.batch_size} at a time)"
    return size


def optimizer_words(optimizer: str, learning_rate: float, reason: str) -> str:
    """Returns the optimizer and its peak learning rate, with the reason for them."""
    text = f"{optimizer} at {learning_rate:.4g}"
    if reason:
        text += f" ({reason})"
    return text


def _parameters(start: TrainingStart) -> str:
    """Returns the size of the model, and how much of it is trained, where not all is."""
    millions = start.parameters / 1e6
    trained = start.trained_parameters or start.parameters
    if trained < start.parameters:
        percent = 100 * trained / start.parameters
        # A head alone may have some hundreds, which are 0.00M.
        number = f"{trained:,}"
        if trained >= 1e5:
            number = f"{trained / 1e6:.2f}M"
        size = f"{number} of {millions:.2f}M parameters"
        return f"{size} train ({percent:.1f} %)"
    return f"{millions:.1f}M parameters"


def _vocabulary(vocabulary: Vocabulary | None) -> str:
    if vocabulary is None:
        return ""
    return f", {vocabulary.used:,} of {vocabulary.all:,} tokens in use"


def imports(seconds: ImportTimes, nodes: int) -> str:
    """Returns how long the imports of the ranks took, on one node or several."""
    if nodes == 1:
        return f"{seconds.max:.1f} s"
    span = f"{seconds.min:.1f} to {seconds.max:.1f} s a node"
    median = f"median {seconds.median:.1f} s"
    return f"{span}, {median}; the slowest: {seconds.slowest}"


def describe_step(step: Step) -> str:
    """Returns a step that ends a window of the speed, as a line."""
    parts = []
    if step.epoch is not None:
        parts.append(f"epoch {step.epoch:.2f}")
    position = f"step {step.step}"
    if step.total_steps:
        position += f"/{step.total_steps}"
    parts.append(position)
    if step.loss is not None:
        parts.append(f"loss {number(step.loss)}")
    parts.append(f"{step.samples_per_s:.0f} samples/s")
    if step.left_s is not None:
        parts.append(f"{duration(step.left_s)} left")
    return "  ".join(parts)


def metrics_words(metrics: dict[str, Any] | None) -> str:
    """ "accuracy 0.9123  f1 0.8870" """
    if not metrics:
        return ""
    parts = []
    for name, value in metrics.items():
        parts.append(f"{name} {number(value)}")
    return "  ".join(parts)


def describe_epoch(evaluation: Epoch) -> str:
    """Returns an evaluation as a line: when it was, the loss of the last step before it, the
    metrics."""
    epoch = evaluation.epoch
    is_whole = float(epoch).is_integer()
    # 0 stands for a program that does not count epochs.
    if is_whole and epoch:
        when = f"epoch {epoch:g} done"
    elif evaluation.step is not None:
        when = f"after step {evaluation.step}"
    else:
        when = "evaluation"
    if not is_whole:
        when += f" (epoch {epoch:.2f})"
    parts = []
    # A program of the user's own may record one of the two alone.
    if evaluation.loss is not None:
        parts.append(f"train loss {number(evaluation.loss)}")
    if evaluation.metrics:
        parts.append(metrics_words(evaluation.metrics))
    values = "  ".join(parts)
    return f"{when}: {values}"


def describe(record: Record) -> str | None:
    """Returns an event in words; None for one that is shown in another way, or not at all."""
    match record:
        case Epoch():
            return describe_epoch(record)
        case EarlyStop():
            count = record.evaluations
            reason = f"{count} evaluation(s) without a better {record.metric}"
            return f"early stopping after step {record.step}: {reason}"
        case BestSaved():
            values = f"{number(record.best)}, {number(record.last)} at the end"
            return (
                f"saves the model of epoch {record.epoch:g}: {record.metric} {values}"
            )
        case Resume():
            lines = [f"resumes after step {record.step} (from {record.checkpoint})"]
            for change in record.changes:
                lines.append(f"  changed: {change}")
            return "\n".join(lines)
        case Stopping():
            return f"stopping after step {record.step}: {record.reason}"
        case Text():
            return f"{record.event}: {record.text}"
        case _:
            return None
