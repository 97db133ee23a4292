"""What an examination found: each check is ok, a warning or a failure, with what to do."""

from __future__ import annotations

import dataclasses
import queue
import statistics
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from slurmft.core.credentials import HIDDEN, is_private
from slurmft.core.errors import Exit, SlurmftError

Result = TypeVar("Result")

_WIDTH = 100
_TELLING = (
    "APPTAINER_", "CCL_", "CONDA_", "CUDA_", "FI_", "GLOO_", "HF_", "I_MPI_", "KMP_", "LANG", "LC_",
    "LD_", "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "PATH", "PMI", "PYTHON", "SLURM",
    "SRUN_", "TMPDIR", "TORCH", "TRANSFORMERS_", "UCX_", "VIRTUAL_ENV", "XDG_CACHE_HOME",
)  # fmt: skip
"""Variables that say something about a run begin so; no others are reported."""


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """Jobs run, but slower, or not for long, or not as asked."""
    FAILURE = "failure"
    """Jobs do not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at."""

    level: Level
    about: str
    """A word or two: the lines' first column."""
    text: str
    """What was found, with node and figure."""
    cure: str | None = None
    """What to do."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same for programs; units are in the names."""


def ok(about: str, text: str, **figures: Any) -> Check:
    return Check(level=Level.OK, about=about, text=text, figures=figures)


def warning(about: str, text: str, cure: str | None = None, **figures: Any) -> Check:
    return Check(level=Level.WARNING, about=about, text=text, cure=cure, figures=figures)


def failure(about: str, text: str, cure: str | None = None, **figures: Any) -> Check:
    return Check(level=Level.FAILURE, about=about, text=text, cure=cure, figures=figures)


def exit_code(checks: Iterable[Check]) -> int:
    """Warnings are no failure."""
    return Exit.FAILED if any(c.level == Level.FAILURE for c in checks) else Exit.OK


# --- judgement ------------------------------------------------------------------------------------


def slow_ones(values: Mapping[str, float], ratio: float) -> dict[str, float]:
    """Those whose value is below `ratio` times the median, each with its share of the median.

    Of two values the larger is the median: one of the pair is slow, the other one shows it.
    """
    if len(values) < 2:
        return {}
    middle = statistics.median_high(values.values())
    return {name: v / middle for name, v in values.items() if middle > 0 and v < ratio * middle}


def same_everywhere(values: Mapping[str, Any]) -> dict[Any, list[str]]:
    """Value -> the names that have it, the most common value first."""
    found: dict[Any, list[str]] = {}
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def blame(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str, list[str]]]:
    """Failed connections (from, to), by the node that most of them have in common.

    Returns (node, "to" or "from", the other ends), so that few lines name all pairs: a node that
    nobody reaches is one line, as is one that reaches nobody.
    """
    left, found = set(pairs), []
    while left:
        ends: dict[tuple[str, str], list[str]] = {}
        for start, goal in sorted(left):
            ends.setdefault((goal, "to"), []).append(start)
            ends.setdefault((start, "from"), []).append(goal)
        (node, way), others = max(ends.items(), key=lambda item: len(item[1]))
        found.append((node, way, others))
        left -= {(o, node) if way == "to" else (node, o) for o in others}
    return found


# --- deadlines ------------------------------------------------------------------------------------


def within(timeout_s: float, work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, if that takes no longer; else it goes on unheard, in a thread
    that ends with this process: a call that hangs in a dead file system cannot be ended.

    Raises:
        TimeoutError: it takes longer.
    """
    return all_within(timeout_s, [work])[0]()


def all_within(
    timeout_s: float, works: Sequence[Callable[[], Result]]
) -> list[Callable[[], Result]]:
    """Runs all at the same time; for each, in their order, a call that gives its result.

    Those calls raise what the work has raised, or TimeoutError.
    """
    boxes: list[queue.SimpleQueue[Callable[[], Result]]] = [queue.SimpleQueue() for _ in works]
    for work, box in zip(works, boxes, strict=True):
        threading.Thread(target=_fill, args=(work, box), daemon=True).start()
    deadline = time.monotonic() + timeout_s
    found = []
    for box in boxes:
        try:
            found.append(box.get(timeout=max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            late = TimeoutError(f"no answer in {timeout_s:.0f} s")
            found.append(_raising(late))
    return found


def _fill(work: Callable[[], Result], box: queue.SimpleQueue[Callable[[], Result]]) -> None:
    try:
        result = work()
    except Exception as error:
        box.put(_raising(error))
    else:
        box.put(lambda: result)


def _raising(error: Exception) -> Callable[[], Any]:
    def give() -> Any:
        raise error

    return give


def in_words(error: Exception) -> str:
    """An error in a line."""
    if isinstance(error, SlurmftError):
        return " ".join(error.message.split())
    words = getattr(error, "strerror", None) or str(error)
    return words if isinstance(error, (OSError, TimeoutError)) and words else repr(error)


def installed(package: str) -> str | None:
    """The version of a package, which is not imported for it; None: it is not there."""
    from importlib import metadata  # 20 ms

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- output ---------------------------------------------------------------------------------------


def lines(checks: Sequence[Check]) -> list[str]:
    """The checks for people, a paragraph each."""
    about = max((len(c.about) for c in checks), default=0)
    found = []
    for check in checks:
        level = check.level if check.level == Level.OK else check.level.upper()
        indent = f"{level:<7}  {check.about:<{about}}  "
        inner = " " * len(indent)
        found += _filled(check.text, indent, inner)
        if check.cure:
            found += _filled(check.cure, f"{inner}-> ", f"{inner}   ")
    return found


def _filled(text: str, first: str, other: str) -> list[str]:
    """Lines of a text no wider than `_WIDTH`, but for long words; its own line breaks are kept."""
    found: list[str] = []
    for line in text.split("\n"):
        start = other if found else first
        filled = textwrap.wrap(line, _WIDTH, initial_indent=start, subsequent_indent=other,
                               break_long_words=False, break_on_hyphens=False)  # fmt: skip
        spaced = "  " in line  # a table's columns must stay
        found += [start + line] if spaced else filled or [start.rstrip()]
    return found


def summary(checks: Sequence[Check], seconds: float) -> str:
    """The last line."""
    counts = {level: sum(c.level == level for c in checks) for level in Level}
    return (
        f"{counts[Level.OK]} ok, {counts[Level.WARNING]} warning(s), {counts[Level.FAILURE]} "
        f"failure(s); took {seconds:.1f} s"
    )


def as_dict(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(check) for check in checks]


def told_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a report shows; those with a secret's name only as being set."""
    shown = {k: v for k, v in sorted(environment.items()) if k.startswith(_TELLING)}
    return {k: HIDDEN if is_private(k) and v else v for k, v in shown.items()}
