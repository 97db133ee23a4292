"""What srun says of the end of its tasks: the signal that came first.

Its exit code does not say that: when one task is killed, srun ends the others by SIGTERM, and
returns the largest code; when srun itself is to end, it kills them all.
"""

import contextlib
import re
import signal
from pathlib import Path

from slurmft.core.files import read_text
from slurmft.core.text import numbers

_TASK = re.compile(r"srun: error: (\S+): tasks? ([\d,\[\]-]+): (.+)")
_ABORTED = ("srun: Job step aborted", "srun: forcing job termination")
"""How srun begins to end its tasks because it was told to: by a signal to it, or by Slurm."""
GAVE_UP = "srun: error: Timed out waiting for job step to complete"
"""What srun says where tasks have not ended after all signals, as at the time limit. It may end
with 0 then, as if they had ended well."""
_NODE_FAILED = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)
_OUT_OF_MEMORY = ("Out Of Memory", "oom_kill event", "oom-kill event")
_RAN_OUT = "out of memory"
"""The words for it in a cause."""
_OVER_LIMIT = re.compile(
    r"slurmstepd-?(\S*): error: StepId=\S+ exceeded memory limit \(\d+ > \d+\)"
)
"""What a node says where Slurm itself compares (JobAcctGatherParams=OverMemoryKill): srun reports
the signal alone."""
_STARTED_AGAIN = re.compile(r"slurmft: (?:requeue|restart): |\*\*\* JOB .+ DUE TO ")
"""Where an attempt ends in the log of a job, which is appended to."""
_SIGNALS = {signal.strsignal(each): each.name for each in signal.Signals}
"""As srun writes a signal -> its name."""
_MOST_CHARACTERS = 2**16
"""Of the end of the file: srun says little."""


def path(submitit: Path, job: str) -> Path:
    """Returns the file that the batch script has srun write its messages to."""
    return submitit / f"{job}_srun_log.err"


def messages_of(log: Path, attempt: int) -> str:
    """Returns the messages of srun in an attempt; "" where there are none."""
    return _messages(log, attempt) or ""


def _messages(log: Path, attempt: int) -> str | None:
    """Returns the messages of srun in an attempt; None where it cannot have written any."""
    try:
        text = read_text(log)[-_MOST_CHARACTERS:]
    except (OSError, UnicodeDecodeError):
        return None
    # The script writes the attempt's number before them.
    _, head, messages = text.rpartition(f"attempt {attempt}\n")
    if not head:
        return None
    return messages


def own_end(log: Path, attempt: int, code: int) -> str:
    """Returns that srun itself was killed, of which it can say nothing; "" where it was not.

    Args:
        code: its exit code, also that of a task which was killed: srun says so of each.
    """
    if code != 128 + signal.SIGKILL:
        return ""
    messages = _messages(log, attempt)
    if messages is None or _TASK.search(messages):
        return ""
    return "srun, which starts the tasks, was killed by SIGKILL on the first node"


def tasks_out_of_memory(log: Path, attempt: int) -> set[int]:
    """Returns the tasks of an attempt of which srun says that memory ran out; none, where another
    task has ended otherwise."""
    tasks = set()
    for line in messages_of(log, attempt).splitlines():
        if line.startswith(_ABORTED):
            return set()
        match = _TASK.match(line)
        if match is None:
            continue
        _, numbers_of_tasks, status = match.groups()
        if status not in _OUT_OF_MEMORY:
            return set()
        # Of a range without an end, as a line may be cut, nothing is known.
        with contextlib.suppress(ValueError):
            tasks.update(numbers(numbers_of_tasks.strip("[]")))
    return tasks


def cause_of(log: Path, attempt: int) -> str:
    """Returns what ended the tasks of an attempt, as srun says it; "" where it does not say that a
    signal did."""
    messages = messages_of(log, attempt)
    for line in messages.splitlines():
        if line.startswith(_ABORTED):
            return "srun was ended by a signal, and ended the tasks"
        match = _TASK.match(line)
        if match is None:
            continue
        host, _, words = match.groups()
        status = words.removesuffix(" (core dumped)")
        if status in _OUT_OF_MEMORY:
            return f"the task of {host} was killed: {_RAN_OUT}"
        name = _SIGNALS.get(status)
        # The first that ended is the cause. With an exit code, it has recorded why itself.
        if name is None:
            return ""
        is_oom = any(words in messages for words in _OUT_OF_MEMORY)
        memory = ""
        if name == "SIGKILL" and is_oom:
            memory = f" ({_RAN_OUT})"
        return f"the task of {host} was killed by {name}{memory}"
    return ""


def failed_nodes(log: Path, attempt: int) -> list[str]:
    """Returns the nodes that Slurm gave up in an attempt, as lists of Slurm's: "n[1-3]"."""
    return _NODE_FAILED.findall(messages_of(log, attempt))


def over_limit(job_log: Path) -> str:
    """Returns the cause where Slurm killed a task of the last attempt for its memory, by the log of
    the job; "" elsewhere."""
    try:
        text = read_text(job_log)[-_MOST_CHARACTERS:]
    except (OSError, UnicodeDecodeError):
        return ""
    *_, of_attempt = _STARTED_AGAIN.split(text)
    match = _OVER_LIMIT.search(of_attempt)
    if match is None:
        return ""
    host = match[1] or "a node"
    return f"the task of {host} was killed: {_RAN_OUT}"


def is_out_of_memory(cause: str) -> bool:
    """Returns whether a cause is that Slurm or the kernel killed a task for its memory."""
    return _RAN_OUT in cause
