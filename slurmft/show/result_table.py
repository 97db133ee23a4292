"""The table at the end of a run: its metrics, and what it took."""

import contextlib
from collections.abc import Callable

from slurmft.core.decode import decode_leniently
from slurmft.core.run_files import Result
from slurmft.core.text import duration, hanging, in_bytes, number
from slurmft.show import classes
from slurmft.show.progress import UNLIKE, Record, imports


def result_table(result: Record) -> str:
    """Returns the table at the end of a run, as text: metrics, and a row for all else that it has.
    A row whose values the result lacks, or has in another type, is left out."""
    metrics = decode_leniently(result, Result).metrics or {}
    rows = [(name, number(value)) for name, value in metrics.items()]
    for name, describe in _ROWS.items():
        with contextlib.suppress(*UNLIKE):
            rows.append((name, describe(result)))
    rows = [row for row in rows if row[1]]
    width = max((len(name) for name, _ in rows), default=0)
    lines = [hanging(f"  {name:<{width}}  ", value, width + 4) for name, value in rows]
    class_lines = classes.lines(result)
    if class_lines:
        lines += ["", *(f"  {line}" for line in class_lines)]
    bar = "-" * max((len(part) for line in lines for part in line.splitlines()), default=0)
    return "\n".join([bar, *lines, bar])


def _rates(result: Record, phase: str) -> str:
    rate = result[f"{phase}_samples_per_s"]
    return f"{rate:,.0f} samples/s, {rate / result['world_size']:,.0f} per process"


def _memory(peaks: list[int]) -> str:
    return f"{in_bytes(max(peaks))} in the largest rank, {in_bytes(min(peaks))} in the smallest"


def _time(r: Record) -> str:
    again = f"; job started {r['attempts']:d} times" if r["attempts"] > 1 else ""
    start = f", including {r['startup_s']:.1f} s start-up" if "startup_s" in r else ""
    return f"{duration(r['wall_s'])}{start}{again}"


_ROWS: dict[str, Callable[[Record], str]] = {
    "predictions": lambda r: f"{r['output']:s}",
    "loss": lambda r: f"{r['loss']:.4f}",
    "processes": lambda r: f"{r['world_size']:d} on {r['nodes']:d} node(s)",
    "global batch": lambda r: f"{r['global_batch_size']:d} samples, {r['steps']:d} steps",
    "precision": lambda r: f"{r['precision']:s}, {r['backend']:s}",
    "imports": imports,
    "phases": lambda r: "  ".join(f"{k} {s:.3f} s" for k, s in dict.items(r["phases_s"])),
    "train": lambda r: _rates(r, "train"),
    "evaluate": lambda r: _rates(r, "evaluate"),
    "tokens": lambda r: (
        f"{r['train_tokens_per_s']:,.0f} real tokens/s in training, "
        f"{r['train_padded_tokens_per_s']:,.0f} with padding"
    ),
    "model": lambda r: f"{r['train_model_tflop_per_s']:,.3g} TFLOP/s in training",
    "peak memory": lambda r: _memory(r["peak_memory_bytes"]),
    "time": _time,
}
