"""The table at the end of a run: its metrics, and what it took."""

import contextlib
from collections.abc import Callable
from typing import Any

from slurmft.core.decode import decode, decode_leniently
from slurmft.core.run_files import Result
from slurmft.core.run_records import ImportTimes
from slurmft.core.text import counted, duration, hanging, in_bytes, number
from slurmft.show import classes
from slurmft.show.progress import imports, optimizer_words

_UNLIKE = (LookupError, TypeError, ValueError, ArithmeticError)
"""The errors of describing a result that lacks a value, or has one of another type."""

Values = dict[str, Any]


def result_table(result: Values) -> str:
    """Returns the table at the end of a run, as text: metrics, and a row for all else that it has.
    A row whose values the result lacks, or has in another type, is left out."""
    metrics = decode_leniently(result, Result).metrics or {}
    rows = []
    for name, value in metrics.items():
        rows.append((name, number(value)))
    for name, describe in _ROWS.items():
        with contextlib.suppress(*_UNLIKE):
            text = describe(result)
            if text:
                rows.append((name, text))
    names = [name for name, _ in rows]
    width = max(map(len, names), default=0)
    lines = []
    for name, text in rows:
        head = f"  {name:<{width}}  "
        # A value that is wider than the terminal goes on below itself, in lines of their own.
        row = hanging(head, text, len(head))
        lines += row.splitlines()
    class_lines = classes.lines(result)
    if class_lines:
        lines.append("")
        lines += [f"  {line}" for line in class_lines]
    longest = max(map(len, lines), default=0)
    bar = "-" * longest
    return "\n".join([bar, *lines, bar])


def _rates(result: Values, phase: str) -> str:
    rate = result[f"{phase}_samples_per_s"]
    rate_of_process = rate / result["world_size"]
    return f"{rate:,.0f} samples/s, {rate_of_process:,.0f} per process"


def _memory(r: Values) -> str:
    peaks_bytes = r["peak_memory_bytes"]
    largest = in_bytes(max(peaks_bytes))
    smallest = in_bytes(min(peaks_bytes))
    return f"{largest} in the largest rank, {smallest} in the smallest"


def _imports(r: Values) -> str:
    seconds = decode(r["imports_s"], ImportTimes)
    return imports(seconds, r["nodes"])


def _time(r: Values) -> str:
    text = duration(r["wall_s"])
    # Only the built-in training records it.
    if "startup_s" in r:
        startup_s = r["startup_s"]
        text += f", including {startup_s:.1f} s start-up"
    attempts = r["attempts"]
    if attempts > 1:
        text += f"; job started {attempts:d} times"
    return text


def _phases(r: Values) -> str:
    phases = []
    # dict.items rather than a method: a TypeError, which leaves the row out, for another type.
    for name, seconds in dict.items(r["phases_s"]):
        phases.append(f"{name} {seconds:.3f} s")
    return "  ".join(phases)


def _tokens(r: Values) -> str:
    rate = r["train_tokens_per_s"]
    rate_with_padding = r["train_padded_tokens_per_s"]
    real = f"{rate:,.0f} real tokens/s in training"
    return f"{real}, {rate_with_padding:,.0f} with padding"


# The formats check the types, too: `:d` and `:s` raise ValueError for a value of another type,
# which leaves its row out.
def _processes(r: Values) -> str:
    count = r["world_size"]
    nodes = r["nodes"]
    return f"{count:d} on {nodes:d} node(s)"


def _batch(r: Values) -> str:
    samples = r["global_batch_size"]
    steps = r["steps"]
    text = f"{counted(samples, 'sample')}, {counted(steps, 'step')}"
    # Results of earlier versions and of other programs lack it.
    step_samples = r.get("step_samples", samples)
    if step_samples < samples:
        text += f"; the data has {step_samples:d} samples"
    batch_size = r.get("batch_size")
    if batch_size is not None:
        text += f"; --batch-size auto: {batch_size:d} at a time"
    return text


def _optimizer(r: Values) -> str:
    optimizer = r["optimizer"]
    reason = r.get("optimizer_reason", "")
    return optimizer_words(f"{optimizer:s}", float(r["learning_rate"]), f"{reason:s}")


def _precision(r: Values) -> str:
    precision = r["precision"]
    backend = r["backend"]
    return f"{precision:s}, {backend:s}"


def _model_speed(r: Values) -> str:
    speed = r["train_model_tflop_per_s"]
    return f"{speed:,.3g} TFLOP/s in training"


def _saved_model(r: Values) -> str:
    compared = r["saved_model"]
    samples = compared["samples"]
    difference = compared["largest_difference"]
    return (
        f"transformers loads it: outputs for {counted(samples, 'validation sample')} differ by "
        f"at most {difference:.1g}"
    )


_ROWS: dict[str, Callable[[Values], str]] = {
    "predictions": lambda r: f"{r['output']:s}",
    "train loss": lambda r: f"{r['loss']:.4f}",
    "processes": _processes,
    "global batch": _batch,
    "optimizer": _optimizer,
    "precision": _precision,
    "imports": _imports,
    "phases": _phases,
    "train": lambda r: _rates(r, "train"),
    "evaluate": lambda r: _rates(r, "evaluate"),
    "tokens": _tokens,
    "model": _model_speed,
    "saved model": _saved_model,
    "peak memory": _memory,
    "time": _time,
}
