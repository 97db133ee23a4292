"""The state of a run in words, its colour, and the commands that make sense then."""

from collections.abc import Mapping
from typing import Any

from slurmft.core.program import PREDICT
from slurmft.core.text import after_state, brief, number

COLOURS = {
    "running": "green",
    "completed": "green",
    "finished": "green",
    "failed": "red",
    "cancelled": "red",
    "timeout": "red",
    "pending": "yellow",
    "requeued": "yellow",
    "stopping": "yellow",
}
"""State, or Slurm's word for it -> the colour of a line that has it."""
UNSUCCESSFUL = ("failed", "vanished", "cancelled")
_AFTER_THE_END = ("logs", "resume", "follow")
_NEXT = {
    "running": ("follow", "watch", "logs", "cancel"),
    "finished": ("report",),
    "failed": _AFTER_THE_END,
    "cancelled": _AFTER_THE_END,
    "vanished": _AFTER_THE_END,
}


def next_commands(state: str, kind: str) -> tuple[str, ...]:
    """Returns the commands to type next; in other states than those above, as of a running run.

    Args:
        state: that of the run.
        kind: that of its program.
    """
    commands = _NEXT.get(state, _NEXT["running"])
    # A report is of what was trained.
    if kind == PREDICT:
        return tuple(each for each in commands if each != "report")
    return commands


def note(facts: Mapping[str, Any]) -> str:
    """Returns the details of a state: its reason, the expected start, the number of requeues."""
    state = str(facts["state"])
    reason = after_state(str(facts["reason"]), state)
    details = []
    waiting = facts["waiting"]
    # One that names the runs it waits for says more than Slurm's reason.
    if waiting is not None and reason in ("", waiting["reason"]):
        details.append(_waiting_words(waiting))
    elif reason and state != "finished":
        details.append(reason)
    expected_start = facts["expected_start"]
    if expected_start:
        # squeue writes 2026-11-22T14:05:00.
        clock = expected_start.replace("T", " ")
        is_certain = waiting is not None and waiting["reason"].startswith("BeginTime")
        # Before the time that the user, or a requeue, has set, it cannot start: that is no guess.
        if is_certain:
            details.append(f"that is {clock}")
        else:
            details.append(f"Slurm guesses a start at {clock}")
    requeues = facts["requeues"]
    if requeues == 1:
        details.append("requeued once")
    elif requeues:
        details.append(f"requeued {requeues} times")
    return "; ".join(filter(None, details))


def _waiting_words(waiting: dict[str, Any]) -> str:
    """ "jobs of higher priority are before it (Priority)" """
    cause = str(waiting["cause"])
    # Slurm's word, by which support and documentation of the site speak.
    word, _, _ = str(waiting["reason"]).partition(",")
    if word == "None":
        return cause
    return f"{cause} ({word})"


def waiting_advice(facts: Mapping[str, Any]) -> str:
    """Returns whether a pending job starts by itself, and what to do; "" of other jobs."""
    waiting = facts["waiting"]
    if waiting is None:
        return ""
    start = "does not start by itself"
    if waiting["by_itself"]:
        start = "starts by itself"
    if waiting["action"]:
        start += f"; {waiting['action']}"
    return start


def state_words(facts: Mapping[str, Any]) -> str:
    """ "requeued: BeginTime; starts about 2026-11-22 14:05:00; requeued 2 times" """
    state = str(facts["state"])
    # Without folders: the page and the line have little room for a reason.
    details = brief(note(facts))
    if not details:
        return state
    return f"{state}: {details}"


def progress_words(facts: Mapping[str, Any]) -> str:
    """ "step 120/500 (24 %), epoch 0.24, loss 0.4312" """
    steps_done = facts["steps_done"]
    steps_total = facts["steps_total"]
    if steps_done is None or not steps_total:
        return ""
    # Rounded down: 100 % means that the last step is done.
    percent = 100 * steps_done // steps_total
    parts = [f"step {steps_done}/{steps_total} ({percent} %)"]
    epoch = facts["epoch"]
    if epoch is not None:
        parts.append(f"epoch {epoch:.2f}")
    loss = facts["loss"]
    if loss is not None:
        parts.append(f"loss {number(loss)}")
    if facts.get("evaluating"):
        done, total = facts["evaluating"]
        parts.append(f"evaluating {done}/{total} samples")
    return ", ".join(parts)
