"""The classes of a result: precision, recall, and which classes are taken for which."""

from itertools import islice
from typing import Any

from slurmft.core.decode import decode_leniently
from slurmft.core.run_files import ClassScores, Result
from slurmft.core.text import aligned, counted, shown

SHOWN = 20
"""Of more classes, those with the lowest F1 are shown."""
_CONFUSIONS = 5
_NAME_WIDTH = 20


def of(result: Any) -> dict[str, ClassScores]:
    """Returns the scores of the classes in a result, by name; the worst first if they are many."""
    classes = decode_leniently(result, Result).classes or {}
    # In the order of the data, where all have room.
    if len(classes) <= SHOWN:
        return classes
    worst_first = sorted(classes.items(), key=lambda item: item[1].f1)
    return dict(worst_first)


def lines(result: Any) -> list[str]:
    """Returns the classes and the most frequent confusions, in less than 60 columns."""
    classes = of(result)
    if not classes:
        return []
    rows = [("class", "precision", "recall", "f1", "texts")]
    for name, scores in islice(classes.items(), SHOWN):
        row = (
            # Classes are named by the user's data: a name may be a sentence.
            shown(name, _NAME_WIDTH),
            f"{scores.precision:.4f}",
            f"{scores.recall:.4f}",
            f"{scores.f1:.4f}",
            f"{scores.support:,}",
        )
        rows.append(row)
    text = aligned(rows)
    count = len(classes)
    if count > SHOWN:
        text.append(
            f"the {SHOWN} of {count:,} classes with the lowest f1; all: result.json"
        )
    # Of all classes: a confusion of two others may be more frequent than any of those shown.
    return text + _confusions(classes)


def _confusions(classes: dict[str, ClassScores]) -> list[str]:
    confusions = []
    for name, scores in classes.items():
        predicted_as = scores.predicted_as or {}
        for other, count in predicted_as.items():
            # What was predicted right is in the same dictionary.
            if other != name:
                confusions.append((count, name, other))
    # Not reverse=True by whole tuples: equal counts stay in the order of the classes.
    confusions.sort(key=lambda confusion: -confusion[0])
    text = []
    for count, name, other in confusions[:_CONFUSIONS]:
        right = shown(name, _NAME_WIDTH)
        wrong = shown(other, _NAME_WIDTH)
        text.append(f"{right} taken for {wrong}: {counted(count, 'time')}")
    return text
