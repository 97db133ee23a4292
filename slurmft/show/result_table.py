"""The table at the end of a run: its metrics, and what it took."""

import contextlib
from collections.abc import Callable
from typing import Any

from slurmft.core.decode import decode, decode_leniently
from slurmft.core.run_files import Result
from slurmft.core.run_records import ImportTimes
from slurmft.core.text import duration, hanging, in_bytes, number
from slurmft.show import classes
from slurmft.show.progress import imports

_UNLIKE = (LookupError, TypeError, ValueError, ArithmeticError)
"""The errors of describing a result that lacks a value, or has one of another type."""

Values = dict[str, Any]


def result_table(result: Values) -> str:
    """Returns the table at the end of a run, as text: metrics, and a row for all else that it has.
    A row whose values the result lacks, or has in another type, is left out."""
    metrics = decode_leniently(result, Result).metrics or {}
    rows = [(name, number(value)) for name, value in metrics.items()]
    for name, describe in _ROWS.items():
        with contextlib.suppress(*_UNLIKE):
            text = describe(result)
            if text:
                rows.append((name, text))
    width = max((len(name) for name, _ in rows), default=0)
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
    longest = max((len(line) for line in lines), default=0)
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
    if "startup_s" in r:
        text += f", including {r['startup_s']:.1f} s start-up"
    if r["attempts"] > 1:
        text += f"; job started {r['attempts']:d} times"
    return text


def _phases(r: Values) -> str:
    # dict.items rather than a method: a TypeError, which leaves the row out, for another type.
    phases = dict.items(r["phases_s"])
    return "  ".join(f"{name} {seconds:.3f} s" for name, seconds in phases)


def _tokens(r: Values) -> str:
    rate = r["train_tokens_per_s"]
    rate_with_padding = r["train_padded_tokens_per_s"]
    return (
        f"{rate:,.0f} real tokens/s in training, {rate_with_padding:,.0f} with padding"
    )


# The formats check the types, too: `:d` and `:s` raise ValueError for a value of another type,
# which leaves its row out.
_ROWS: dict[str, Callable[[Values], str]] = {
    "predictions": lambda r: f"{r['output']:s}",
    "train loss": lambda r: f"{r['loss']:.4f}",
    "processes": lambda r: f"{r['world_size']:d} on {r['nodes']:d} node(s)",
    "global batch": lambda r: (
        f"{r['global_batch_size']:d} samples, {r['steps']:d} steps"
    ),
    "precision": lambda r: f"{r['precision']:s}, {r['backend']:s}",
    "imports": _imports,
    "phases": _phases,
    "train": lambda r: _rates(r, "train"),
    "evaluate": lambda r: _rates(r, "evaluate"),
    "tokens": _tokens,
    "model": lambda r: f"{r['train_model_tflop_per_s']:,.3g} TFLOP/s in training",
    "peak memory": _memory,
    "time": _time,
}
