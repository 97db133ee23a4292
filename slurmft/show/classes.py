"""The classes of a result: precision, recall, and which classes are taken for which."""

from typing import Any

from slurmft.core.decode import decode_leniently
from slurmft.core.run_files import ClassScores, Result
from slurmft.core.text import aligned, shown

SHOWN = 20
"""Of more classes, those with the lowest F1 are shown."""
_CONFUSIONS = 5
_NAME_WIDTH = 20


def of(result: Any) -> dict[str, ClassScores]:
    """Returns the scores of the classes in a result, by name; the worst first if they are many."""
    classes = decode_leniently(result, Result).classes or {}
    if len(classes) <= SHOWN:
        return classes
    return dict(sorted(classes.items(), key=lambda item: item[1].f1))


def lines(result: Any) -> list[str]:
    """Returns the classes and the most frequent confusions, in less than 60 columns."""
    classes = of(result)
    if not classes:
        return []
    rows = [("class", "precision", "recall", "f1", "texts")]
    for name, scores in list(classes.items())[:SHOWN]:
        numbers = (f"{scores.precision:.4f}", f"{scores.recall:.4f}", f"{scores.f1:.4f}")
        rows.append((shown(name, _NAME_WIDTH), *numbers, f"{scores.support:,}"))
    text = aligned(rows)
    if len(classes) > SHOWN:
        text.append(f"the {SHOWN} of {len(classes):,} classes with the lowest f1; all: result.json")
    return text + _confusions(classes)


def _confusions(classes: dict[str, ClassScores]) -> list[str]:
    confusions = []
    for name, scores in classes.items():
        for other, count in (scores.predicted_as or {}).items():
            if other != name:
                confusions.append((count, name, other))
    confusions.sort(key=lambda confusion: -confusion[0])
    return [
        f"{shown(name, _NAME_WIDTH)} taken for {shown(other, _NAME_WIDTH)}: {count:,} times"
        for count, name, other in confusions[:_CONFUSIONS]
    ]
