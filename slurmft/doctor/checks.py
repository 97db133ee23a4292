"""One finding of an examination: ok, a warning or a failure, with a hint what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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
    hint: str | None = None
    """What to do."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same for programs; units are in the names."""


def ok(about: str, text: str, **figures: Any) -> Check:
    return Check(level=Level.OK, about=about, text=text, figures=figures)


def warning(about: str, text: str, hint: str | None = None, **figures: Any) -> Check:
    return Check(level=Level.WARNING, about=about, text=text, hint=hint, figures=figures)


def failure(about: str, text: str, hint: str | None = None, **figures: Any) -> Check:
    return Check(level=Level.FAILURE, about=about, text=text, hint=hint, figures=figures)
