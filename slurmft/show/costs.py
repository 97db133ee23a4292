"""The costs of runs as a line or a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from slurmft.core.text import ScreenColumn, in_bytes, on_screen, shown_with_end

_HOURS = {"node_hours": "node", "gpu_hours": "GPU", "cpu_hours": "CPU"}
_HOUR_RANKS = (0, 1, 3)
"""Columns of the highest rank are left out first on a narrow terminal."""
_J_PER_KWH = 3.6e6


def words(cost: Mapping[str, Any]) -> str:
    """ "2.50 node-hours, 10.00 GPU-hours; 9.1 GiB of 64.0 GiB a node; energy unknown" """
    hour_parts = []
    for key, name in _HOURS.items():
        device_hours = cost[key]
        # A run without GPUs has no line of 0.00 GPU-hours.
        if device_hours:
            amount = hours(device_hours)
            hour_parts.append(f"{amount} {name}-hours")
    parts = [
        ", ".join(hour_parts),
        memory(cost),
        f"energy {energy(cost)}",
    ]
    return "; ".join(part for part in parts if part)


def hours(value: float | None) -> str:
    """ "2.50", "0.0042"; "-" where it is not known."""
    if value is None:
        return "-"
    if value >= 0.1 or value == 0:
        return f"{value:,.2f}"
    # Two decimals would show a run of half a minute as 0.01.
    return f"{value:.2g}"


def memory(cost: Mapping[str, Any]) -> str:
    """ "9.1 GiB of 64.0 GiB a node"; "" where the peak is not known."""
    peak_bytes = cost["peak_memory_bytes"]
    requested_bytes = cost["asked_memory_bytes"]
    if not peak_bytes:
        return ""
    text = in_bytes(peak_bytes)
    # Without an answer of sacct the limit is not known.
    if requested_bytes:
        text += f" of {in_bytes(requested_bytes)}"
    return f"{text} a node"


def energy(cost: Mapping[str, Any]) -> str:
    """ "1.25 kWh" """
    energy_j = cost["energy_j"]
    if not energy_j:
        return "unknown"
    kwh = energy_j / _J_PER_KWH
    return f"{kwh:,.3g} kWh"


def table(names: Sequence[str], costs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each run, and the sum, as the terminal has room for it."""
    total = {}
    for key in (*_HOURS, "energy_j"):
        # None is what is not known of a run: the sum has a mark then.
        total[key] = sum(cost[key] or 0 for cost in costs)
    memories = []
    for cost in costs:
        # The head of the column says "a node".
        peak = memory(cost).removesuffix(" a node")
        memories.append(peak or "-")
    memories.append("")  # peaks of several runs have no sum
    run_names = [*names, "in all"]
    columns = [ScreenColumn("run", run_names, 0, 26, shown_with_end)]
    ranked_hours = zip(_HOUR_RANKS, _HOURS.items(), strict=True)
    for rank, (key, name) in ranked_hours:
        cells = [hours(cost[key]) for cost in costs]
        # Without accounting, hours of GPUs and CPUs are known of runs that recorded their hardware.
        total_hours = hours(total[key])
        cells.append(_mark(costs, key) + total_hours)
        columns.append(ScreenColumn(f"{name}-h", cells, rank))
    energies = [energy(cost) for cost in costs]
    if total["energy_j"]:
        total_energy = energy(total)
        energies.append(_mark(costs, "energy_j") + total_energy)
    else:
        energies.append("unknown")
    columns.append(ScreenColumn("memory a node", memories, 2))
    columns.append(ScreenColumn("energy", energies, 4))
    return on_screen(columns)


def _mark(costs: Sequence[Mapping[str, Any]], key: str) -> str:
    """Returns the sign before a sum: "at least" where it is not known of every run."""
    if any(cost[key] is None for cost in costs):
        return "≥ "
    return ""
