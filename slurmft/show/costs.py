"""What runs cost, as a line or a table."""

from collections.abc import Sequence
from typing import Any

from slurmft.core.text import ScreenColumn, in_bytes, on_screen

_HOURS = {"node_hours": "node", "gpu_hours": "GPU", "cpu_hours": "CPU"}


def words(cost: dict[str, Any]) -> str:
    """ "2.50 node-hours, 10.00 GPU-hours; 9.1 GiB of 64.0 GiB a node; energy unknown" """
    parts = [f"{hours(cost[key])} {name}-hours" for key, name in _HOURS.items() if cost[key]]
    return "; ".join(filter(None, (", ".join(parts), memory(cost), f"energy {energy(cost)}")))


def hours(value: float | None) -> str:
    """ "2.50", "0.0042"; "-" where it is not known."""
    if value is None:
        return "-"
    return f"{value:,.2f}" if value >= 0.1 or not value else f"{value:.2g}"


def memory(cost: dict[str, Any]) -> str:
    """ "9.1 GiB of 64.0 GiB a node"; "" where the peak is not known."""
    peak, asked = cost["peak_memory_bytes"], cost["asked_memory_bytes"]
    return f"{in_bytes(peak)}{f' of {in_bytes(asked)}' if asked else ''} a node" if peak else ""


def energy(cost: dict[str, Any]) -> str:
    return f"{cost['energy_j'] / 3.6e6:,.3g} kWh" if cost["energy_j"] else "unknown"


def table(names: Sequence[str], costs: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each run, and the sum, as the terminal has room for it."""
    total = {key: sum(cost[key] or 0 for cost in costs) for key in (*_HOURS, "energy_j")}
    rows = [*costs, total]
    memories = [memory(cost).removesuffix(" a node") or "-" for cost in costs]
    return on_screen([
        ScreenColumn("run", [*names, "in all"], 0, 20),
        *(
            ScreenColumn(f"{name}-h", [hours(row[key]) for row in rows], rank)
            for rank, (key, name) in zip((0, 1, 3), _HOURS.items(), strict=True)
        ),
        ScreenColumn("memory a node", [*memories, ""], 2),
        ScreenColumn("energy", [energy(row) for row in rows], 4),
    ])  # fmt: skip
