"""Failures of a program because memory ran out: how many there were, and what its command line has
instead of the sizes that did not fit."""

import re
from collections.abc import Sequence

from slurmft.core.errors import UsageError
from slurmft.runs.rundir import RunDir

_PLACEHOLDER = re.compile(r"\{(memory_failures|(halved|doubled):([^{}]*))\}")


def count(run: RunDir) -> int:
    """Returns how many starts of a run's program have ended so; ranks that fail together are one
    failure."""
    failures = 0
    last_counted = 0
    other_attempts = set()
    for failure in run.all_failures():
        if failure.memory_failures is not None:
            failures = max(failures, failure.memory_failures + 1)
            last_counted = max(last_counted, failure.attempt)
        elif failure.out_of_memory:
            # Slurm, or the kernel, has ended slurmft's own process.
            other_attempts.add(failure.attempt)
    # A start has counted all that were before it.
    later_attempts = {number for number in other_attempts if number > last_counted}
    return failures + len(later_attempts)


def check(words: Sequence[str]) -> None:
    """Raises UsageError where a placeholder of a command line has no size."""
    for match in _matches(words):
        if match[2] and not re.fullmatch(r"[1-9]\d{0,8}", match[3], re.ASCII):
            raise UsageError(
                f"{match[0]} has no size to begin with",
                f"write it as {{{match[2]}:32}}",
            )


def has_placeholder(words: Sequence[str]) -> bool:
    """Returns whether a command line changes when memory runs out."""
    return bool(_matches(words))


def filled_in(words: Sequence[str], failures: int) -> list[str]:
    """Returns a command line with the values of its placeholders.

    {memory_failures} is the number of failures. {halved:32} is 32, 16, 8, ..., as long as all such
    sizes can be halved without a rest, and {doubled:1} is 1, 2, 4, ..., as often: their product, a
    global batch, stays.
    """
    halvings = failures
    for match in _matches(words):
        if match[2] == "halved":
            halvings = min(halvings, _times_even(int(match[3])))

    def value(match: re.Match[str]) -> str:
        match match[2]:
            case "halved":
                return str(int(match[3]) >> halvings)
            case "doubled":
                return str(int(match[3]) << halvings)
            case _:
                return str(failures)

    return [_PLACEHOLDER.sub(value, word) for word in words]


def _matches(words: Sequence[str]) -> list[re.Match[str]]:
    return [match for word in words for match in _PLACEHOLDER.finditer(word)]


def _times_even(size: int) -> int:
    """Returns how often a size can be halved without a rest."""
    lowest_bit = size & -size
    return lowest_bit.bit_length() - 1
