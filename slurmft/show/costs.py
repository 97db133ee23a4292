"""The costs of runs as a line or a table."""

from collections.abc import Sequence
from typing import Any

from slurmft.core.text import ScreenColumn, in_bytes, on_screen

_HOURS = {"node_hours": "node", "gpu_hours": "GPU", "cpu_hours": "CPU"}
_HOUR_RANKS = (0, 1, 3)
"""Columns of the highest rank are left out first on a narrow terminal."""
_J_PER_KWH = 3.6e6


def words(cost: dict[str, Any]) -> str:
    """ "2.50 node-hours, 10.00 GPU-hours; 9.1 GiB of 64.0 GiB a node; energy unknown" """
    hour_parts = []
    for key, name in _HOURS.items():
        if cost[key]:
            hour_parts.append(f"{hours(cost[key])} {name}-hours")
    parts = [", ".join(hour_parts), memory(cost), f"energy {energy(cost)}"]
    return "; ".join(part for part in parts if part)


def hours(value: float | None) -> str:
    """ "2.50", "0.0042"; "-" where it is not known."""
    if value is None:
        return "-"
    if value >= 0.1 or value == 0:
        return f"{value:,.2f}"
    return f"{value:.2g}"


def memory(cost: dict[str, Any]) -> str:
    """ "9.1 GiB of 64.0 GiB a node"; "" where the peak is not known."""
    peak_bytes = cost["peak_memory_bytes"]
    requested_bytes = cost["asked_memory_bytes"]
    if not peak_bytes:
        return ""
    # Without an answer of sacct the limit is not known.
    limit = f" of {in_bytes(requested_bytes)}" if requested_bytes else ""
    return f"{in_bytes(peak_bytes)}{limit} a node"


def energy(cost: dict[str, Any]) -> str:
    """ "1.25 kWh" """
    if not cost["energy_j"]:
        return "unknown"
    return f"{cost['energy_j'] / _J_PER_KWH:,.3g} kWh"


def table(names: Sequence[str], costs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each run, and the sum, as the terminal has room for it."""
    # What is not known of a run counts as nothing in the sum.
    total = {}
    for key in (*_HOURS, "energy_j"):
        total[key] = sum(cost[key] or 0 for cost in costs)
    rows = [*costs, total]
    # The head of the column says "a node". Peaks of several runs have no sum.
    memories = [memory(cost).removesuffix(" a node") or "-" for cost in costs]
    columns = [ScreenColumn("run", [*names, "in all"], 0, 20)]
    for rank, (key, name) in zip(_HOUR_RANKS, _HOURS.items(), strict=True):
        cells = [hours(row[key]) for row in rows]
        columns.append(ScreenColumn(f"{name}-h", cells, rank))
    columns.append(ScreenColumn("memory a node", [*memories, ""], 2))
    columns.append(ScreenColumn("energy", [energy(row) for row in rows], 4))
    return on_screen(columns)
