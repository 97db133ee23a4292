"""What a result says of each class: precision, recall, and which classes are taken for which."""

from typing import Any

from slurmft.core.files import Shape, fits
from slurmft.core.text import aligned, shown

SHOWN = 20
"""Of more classes, those with the lowest F1 are shown."""
_CONFUSIONS = 5
_NUMBERS = ("precision", "recall", "f1")
_SHAPE: Shape = {
    ...: dict.fromkeys(_NUMBERS, float) | {"support": int, "predicted_as?": {...: int}}
}


def of(result: Any) -> dict[str, dict[str, Any]]:
    """The classes of a result, name -> what it says; the worst first where they are many."""
    found: Any = result.get("classes") if isinstance(result, dict) else None
    if not fits(found, _SHAPE):
        return {}
    worst_first = sorted(found.items(), key=lambda item: float(item[1]["f1"]))
    return dict(worst_first) if len(found) > SHOWN else dict(found)


def lines(result: Any) -> list[str]:
    """Classes and the most frequent confusions, in less than 60 columns."""
    found = of(result)
    if not found:
        return []
    rows: list[tuple[str, ...]] = [("class", *_NUMBERS, "texts")]
    for name, values in list(found.items())[:SHOWN]:
        numbers = (f"{values[key]:.4f}" for key in _NUMBERS)
        rows.append((shown(name, 20), *numbers, f"{values['support']:,}"))
    text = aligned(rows)
    if len(found) > SHOWN:
        text.append(f"the {SHOWN} of {len(found):,} classes with the lowest f1; all: result.json")
    pairs = ((true, row.get("predicted_as", {})) for true, row in found.items())
    wrong = [(n, true, other) for true, row in pairs for other, n in row.items() if other != true]
    return text + [
        f"{shown(true, 20)} taken for {shown(other, 20)}: {count:,} times"
        for count, true, other in sorted(wrong, key=lambda each: -each[0])[:_CONFUSIONS]
    ]
