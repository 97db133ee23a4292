"""Damaged files, for hypothesis: bytes cut or overwritten, JSON with other values.

SLURMFT_DAMAGES=10000 tries as many of each file.
"""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_COUNT = int(os.environ.get("SLURMFT_DAMAGES", "60"))

damages = settings(
    max_examples=_COUNT,
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=_COUNT < 1000,
)
"""For tests that are given damaged files."""

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(
        [-1, 0, 10**400, 1e308, float("nan"), float("inf"), "../../x", "\x1b]8;;x"]
    )
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=4,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value within a value."""
    found = [path]
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            found += _places(each, (*path, key))
    return found


@st.composite
def damaged_json(draw: st.DrawFn, text: bytes) -> bytes:
    """JSON with a value that another takes the place of, or that is gone."""
    value = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(_places(value)))
        if not place:
            value = draw(JSON)
            break
        parent = value
        for key in place[:-1]:
            parent = parent[key]
        if draw(st.booleans()):
            parent[place[-1]] = draw(JSON)
        else:
            del parent[place[-1]]
            break
        if not isinstance(value, (dict, list)):
            break
    return json.dumps(value).encode("utf-8", errors="surrogatepass")


@st.composite
def damaged_bytes(draw: st.DrawFn, text: bytes) -> bytes:
    """Bytes that are cut, or overwritten somewhere."""
    at = draw(st.integers(0, len(text)))
    size = draw(st.integers(0, 40))
    return (
        text[:at]
        + draw(st.binary(max_size=20))
        + (b"" if size > 30 else text[at + size :])
    )


@st.composite
def damaged(draw: st.DrawFn, name: str, text: bytes) -> bytes:
    if name.endswith(".json") and draw(st.integers(0, 3)):
        return draw(damaged_json(text))
    if name.endswith(".jsonl") and draw(st.integers(0, 3)):
        lines = text.splitlines(keepends=True)
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = draw(damaged_json(lines[at])) + b"\n"
        return b"".join(lines)
    return draw(damaged_bytes(text))
