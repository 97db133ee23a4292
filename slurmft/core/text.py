"""Numbers, times and tables as people read them."""

import time
from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, in columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def shown(text: str, width: int = 60) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def some(names: Sequence[str], most: int = 8) -> str:
    """Names, not too many: n1, n2 and 998 more"""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def number(value: float | None) -> str:
    """Four digits; JSON has no NaN, and says null."""
    return "nan" if value is None else f"{value:.4f}"


def duration(seconds: float) -> str:
    """47 s, 3:07 min, 2:05:00 h"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{second:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d} h"


def clock(seconds: float) -> str:
    """Unix seconds as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def ago(seconds: float) -> str:
    """How long ago a time (Unix seconds) is."""
    return f"{duration(max(0.0, time.time() - seconds))} ago"


def in_bytes(count: float) -> str:
    """Bytes for people: 512 bytes, 1.5 MiB"""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
