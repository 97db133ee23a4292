"""The checks of an examination, and the report of them: for people, as JSON, and for support."""

import dataclasses
import os
import platform
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, TypedDict

import slurmft
from slurmft.core.credentials import HIDDEN, is_private, redact
from slurmft.core.errors import Exit
from slurmft.core.files import to_json
from slurmft.core.text import clock, screen_width, some
from slurmft.plugins.examine.measurements import Measurements

_WIDEST = 100
# Prefixes of the variables that affect runs; no others are reported.
_REPORTED = (
    "APPTAINER_",
    "CCL_",
    "CONDA_",
    "CUDA_",
    "FI_",
    "GLOO_",
    "HF_",
    "I_MPI_",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "PATH",
    "PMI",
    "PYTHON",
    "SLURM",
    "SRUN_",
    "TMPDIR",
    "TORCH",
    "TRANSFORMERS_",
    "UCX_",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
)


class Level(StrEnum):
    """Severity of a check's result."""

    OK = "ok"
    WARNING = "warning"
    """Jobs run, but slower, or not for long, or not as asked."""
    FAILURE = "failure"
    """Jobs do not run, or not worth the time. A preflight excludes the hosts."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its result."""

    level: Level
    about: str
    """A word or two: the first column of the report."""
    text: str
    """The result, with figures. It does not name `hosts`."""
    hint: str | None = None
    """What to do about it."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The result for programs; units are in the names."""
    hosts: tuple[str, ...] = ()
    """The hosts that the result is about, and that are to blame; empty: all, or none."""

    @property
    def line(self) -> str:
        """The result with the hosts: "n1, n2: text"."""
        if not self.hosts:
            return self.text
        return f"{some(self.hosts)}: {self.text}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"text": self.line}


def ok(about: str, text: str, **figures: Any) -> Check:
    return Check(Level.OK, about, text, figures=figures)


def warning(
    about: str,
    text: str,
    hint: str | None = None,
    *,
    hosts: Sequence[str] = (),
    **figures: Any,
) -> Check:
    return Check(Level.WARNING, about, text, hint, figures, tuple(hosts))


def failure(
    about: str,
    text: str,
    hint: str | None = None,
    *,
    hosts: Sequence[str] = (),
    **figures: Any,
) -> Check:
    return Check(Level.FAILURE, about, text, hint, figures, tuple(hosts))


def merged(checks: Iterable[tuple[str, Check]]) -> list[Check]:
    """Makes one check of those that say the same about several hosts."""
    hosts_of: dict[str, list[str]] = {}
    first_checks: dict[str, Check] = {}
    for host, check in checks:
        # By their texts: the figures of the first of them stand for all.
        hosts_of.setdefault(check.text, []).append(host)
        first_checks.setdefault(check.text, check)
    merged_checks = []
    for text, check in first_checks.items():
        hosts = tuple(hosts_of[text])
        merged_checks.append(dataclasses.replace(check, hosts=hosts))
    return merged_checks


def problems(checks: Iterable[Check]) -> list[Check]:
    """Returns the checks whose result is not ok."""
    return [check for check in checks if check.level != Level.OK]


# --- the report ---


class ReportFacts(TypedDict):
    """The report of an examination."""

    slurmft: str
    """The version."""
    time: float
    """Unix seconds."""
    host: str
    command: list[str]
    seconds: float
    """Duration of the examination, without the queue."""
    waited_s: float
    """Seconds in the queue."""
    exit_code: int
    checks: list[Annotated[dict[str, Any], Check]]


@dataclass(kw_only=True)
class Report:
    """The checks of an examination, and the measurements behind them."""

    checks: list[Check] = field(default_factory=list)
    measured: Measurements = field(default_factory=Measurements)
    seconds: float = 0.0
    """Duration of the examination, without the queue."""
    queued_s: float = 0.0

    @property
    def exit_code(self) -> int:
        """Exit code of doctor. Warnings are no failure."""
        if any(check.level == Level.FAILURE for check in self.checks):
            return Exit.FAILED
        return Exit.OK

    def text(self) -> str:
        """Writes the report for people."""
        counts = Counter(check.level for check in self.checks)
        summary = f"{counts[Level.OK]} ok, "
        summary += f"{counts[Level.WARNING]} warning(s), "
        summary += f"{counts[Level.FAILURE]} failure(s); "
        summary += f"took {self.seconds:.1f} s"
        if self.queued_s:
            summary += f", after {self.queued_s:.1f} s in the queue"
        return redact("\n".join([*lines(self.checks), "", summary]))

    def json(self) -> str:
        """Writes the report for programs."""
        return redact(to_json(self._facts()))

    def for_support(self) -> str:
        """Writes the text, then as JSON all measurements and the environment."""
        now = clock(time.time())
        head = f"slurmft doctor {slurmft.__version__} on {platform.node()}, {now}"
        facts = dict(self._facts())
        facts["measured"] = self.measured
        facts["environment"] = reported_environment(os.environ)
        parts = [
            head,
            "",
            self.text(),
            "",
            "--- JSON ---",
            # Others read it: a token may stand in any variable or message.
            redact(to_json(facts, indent=1)),
            "",
        ]
        return "\n".join(parts)

    def _facts(self) -> ReportFacts:
        return ReportFacts(
            slurmft=slurmft.__version__,
            time=time.time(),
            host=platform.node(),
            command=sys.argv[1:],
            seconds=self.seconds,
            waited_s=self.queued_s,
            exit_code=self.exit_code,
            checks=[check.as_dict() for check in self.checks],
        )


def lines(checks: Sequence[Check]) -> list[str]:
    """Writes the checks for people, a paragraph each."""
    width = max((len(check.about) for check in checks), default=0)
    paragraphs = []
    for check in checks:
        level: str = check.level
        if check.level != Level.OK:
            level = level.upper()  # what is wrong catches the eye
        head = f"{level:<7}  {check.about:<{width}}  "
        indent = " " * len(head)
        paragraphs += _filled(check.line, head, indent)
        if check.hint:
            paragraphs += _filled(check.hint, f"{indent}-> ", f"{indent}   ")
    return paragraphs


def _filled(text: str, first: str, other: str) -> list[str]:
    """Breaks a text into lines that fit the terminal, no wider than `_WIDEST`, but for long words;
    its own line breaks are kept."""
    # Some terminals go to the next line after a character in the last column.
    width = min(_WIDEST, screen_width() - 1)
    # Words have some room behind the indent, also where the terminal has none.
    width = max(width, len(other) + 30)
    filled: list[str] = []
    for line in text.split("\n"):
        start = first
        if filled:
            start = other
        if "  " in line:  # a table: its columns must stay
            filled.append(start + line)
            continue
        wrapped = textwrap.wrap(
            line,
            width,
            initial_indent=start,
            subsequent_indent=other,
            break_long_words=False,
            break_on_hyphens=False,
        )
        filled += wrapped or [start.rstrip()]  # an empty line wraps to nothing
    return filled


def reported_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a report shows. Of secrets it shows only that they are set."""
    reported = {}
    for name, value in sorted(environment.items()):
        if name.startswith(_REPORTED):
            # That a token is empty may be the fault; it gives nothing away.
            is_secret = is_private(name) and value != ""
            reported[name] = HIDDEN if is_secret else value
    return reported
