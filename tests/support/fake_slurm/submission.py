"""sbatch."""

from __future__ import annotations

import getopt
import json
import os
import shlex
import signal
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.fake_slurm import hostlist
from tests.support.fake_slurm.jobs import Job, RefusedError, Table
from tests.support.fake_slurm.schedule import schedule
from tests.support.fake_slurm.settings import (
    CPUS_PER_NODE,
    DEFAULT_PARTITION,
    HOSTS,
    MAX_ARRAY_SIZE,
    MEMORY_MB,
    PARTITIONS,
)

FLAGS = (
    "requeue", "no-requeue", "hold", "parsable", "quiet", "wait", "overcommit", "contiguous",
    "spread-job", "no-kill", "test-only",
)  # fmt: skip
WITH_VALUE = (
    "account", "array", "begin", "chdir", "comment", "constraint", "cpus-per-task", "dependency",
    "error", "exclude", "export", "input", "job-name", "kill-on-invalid-dep", "mail-type",
    "mail-user", "mem", "mem-per-cpu", "nice", "nodelist", "nodes", "ntasks", "ntasks-per-node",
    "open-mode", "output", "partition", "qos", "reservation", "signal", "switches", "time",
    "tmp", "wrap",
)  # fmt: skip
WITH_VALUE_OR_NOT = ("exclusive",)
SHORT = {
    "A": "account", "a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency",
    "D": "chdir", "e": "error", "H": "hold", "J": "job-name", "N": "nodes", "n": "ntasks",
    "o": "output", "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "W": "wait",
    "x": "exclude",
}  # fmt: skip
VARIABLES = {
    "SBATCH_PARTITION": "partition",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_NO_REQUEUE": "no-requeue",
    "SBATCH_REQUEUE": "requeue",
    "SBATCH_EXPORT": "export",
}

SLURMS_OWN = ("SLURM_", "SLURMD_", "SBATCH_")
"""How the variables begin that a job does not take over from its submission."""

FAILED = "sbatch: error: Batch job submission failed: "
NOT_AVAILABLE = f"{FAILED}Requested node configuration is not available"
NO_SCRIPT = """\
sbatch: error: This does not look like a batch script.  The first
sbatch: error: line must start with #! followed by the path to an interpreter.
sbatch: error: For instance: #!/bin/sh"""


def sbatch(*words: str) -> int:
    """Submits a job or an array; with --wait, also waits for its end."""
    given, rest = parse(words)
    name, text = _script(given, rest)
    in_script = _directives(text)
    from_variables = {VARIABLES[k]: os.environ[k] for k in VARIABLES if k in os.environ}
    options = in_script | from_variables | given
    # of two that exclude each other, the later one
    for layer in (from_variables, given):
        if "requeue" in layer:
            options.pop("no-requeue", None)
        elif "no-requeue" in layer:
            options.pop("requeue", None)
    _check(options)
    if "test-only" in options:
        print(_estimate(options), file=sys.stderr)
        return 0

    table = Table.of_environment()
    with table.changing() as jobs:
        new = _jobs_of(options, name, text, rest[1:], table)
        jobs.extend(new)
        schedule(table, jobs)
    job_id = new[0].array or new[0].id
    print(
        job_id if "parsable" in options else f"Submitted batch job {job_id}", flush=True
    )
    return _await_end(table, job_id) if "wait" in options else 0


def parse(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the options before the script, and the script with its arguments."""
    short = "".join(
        letter if name in FLAGS else f"{letter}:" for letter, name in SHORT.items()
    )
    long = [
        *FLAGS,
        *(f"{name}=" for name in WITH_VALUE),
        *WITH_VALUE_OR_NOT,
        "gres=",
        "gpus=",
    ]
    long += ["gpus-per-node=", "gpus-per-task="]
    bare = [w.partition("=")[0] if w.startswith("--exclusive=") else w for w in words]
    try:
        pairs, rest = getopt.getopt(bare, short, long)
    except getopt.GetoptError:
        known = {f"--{name.rstrip('=')}" for name in long}
        word = next(
            w for w in words if w.startswith("-") and w.partition("=")[0] not in known
        )
        text = f"sbatch: unrecognized option '{word}'\n"
        raise RefusedError(
            f'{text}Try "sbatch --help" for more information', 255
        ) from None
    return {
        SHORT.get(key.lstrip("-"), key.lstrip("-")): value for key, value in pairs
    }, rest


def _script(options: Mapping[str, str], rest: Sequence[str]) -> tuple[str, str]:
    """Returns the path of the script, and its text."""
    if "wrap" in options:
        return (
            "wrap",
            f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{options['wrap']}\n",
        )
    try:
        text = Path(rest[0]).read_text()
    except OSError:
        raise RefusedError(f"sbatch: error: Unable to open file {rest[0]}") from None
    if not text.startswith("#!"):
        raise RefusedError(NO_SCRIPT)
    return os.path.abspath(rest[0]), text


def _directives(text: str) -> dict[str, str]:
    """Returns the options of the #SBATCH lines before the first command."""
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            words += _words(line.removeprefix("#SBATCH"))
        elif line.strip() and not line.startswith("#"):
            break
    return parse(words)[0]


def _words(line: str) -> list[str]:
    """Returns the words of an #SBATCH line. Unlike a shell, sbatch takes backslashes for escapes
    within any quotes."""
    words = shlex.shlex(line, posix=True, punctuation_chars=False)
    words.whitespace_split = True
    words.escapedquotes = "'\""
    return list(words)


def _check(options: Mapping[str, str]) -> None:
    """Refuses what the controller refuses. More nodes or time than a partition has are no reason:
    such a job waits for ever."""
    partition = options.get("partition", DEFAULT_PARTITION)
    if partition not in PARTITIONS:
        first = f"sbatch: error: invalid partition specified: {partition}\n"
        raise RefusedError(f"{first}{FAILED}Invalid partition name specified")
    hosts = _hosts(options.get("nodelist", "")) + _hosts(options.get("exclude", ""))
    if not set(hosts) <= set(HOSTS):
        raise RefusedError(f"{FAILED}Invalid node name specified")
    if _megabytes(options.get("mem", "0")) > MEMORY_MB:
        text = "sbatch: error: Memory specification can not be satisfied\n"
        raise RefusedError(text + NOT_AVAILABLE)
    if int(options.get("cpus-per-task", 1)) > CPUS_PER_NODE:
        text = "sbatch: error: CPU count per node can not be satisfied\n"
        raise RefusedError(text + NOT_AVAILABLE)
    gpus = ("gres", "gpus", "gpus-per-node", "gpus-per-task")
    if any(options.get(name, "0") != "0" for name in gpus):
        raise RefusedError(f"{FAILED}Invalid generic resource (gres) specification")
    if "time" in options and minutes(options["time"]) is None:
        raise RefusedError("sbatch: error: Invalid --time specification", 255)
    tasks = _array(options.get("array", ""))[0]
    if tasks and max(tasks) >= MAX_ARRAY_SIZE:
        raise RefusedError(f"{FAILED}Invalid job array specification")


def _estimate(options: Mapping[str, str]) -> str:
    """Returns what sbatch --test-only prints of a job that could start."""
    nodes = int(options.get("nodes", 1))
    cpus = int(options.get("cpus-per-task", 1))
    if "exclusive" in options:
        cpus = CPUS_PER_NODE
    hosts = hostlist.compress(HOSTS[:nodes])
    return (
        f"sbatch: Job 1 to start at 2026-11-20T12:00:00 using {nodes * cpus} processors "
        f"on nodes {hosts} in partition {options.get('partition', DEFAULT_PARTITION)}"
    )


def _jobs_of(
    options: Mapping[str, str],
    script: str,
    text: str,
    arguments: Sequence[str],
    table: Table,
) -> list[Job]:
    """Returns a new job, or the tasks of a new array."""
    tasks, at_most = _array(options.get("array", ""))
    first_id = table.new_id()
    # The array's own id is that of its last task, as in Slurm.
    ids = [*(table.new_id() for _ in tasks[1:]), first_id]
    spool = table.folder / "spool" / f"job{first_id:05}"
    spool.mkdir(parents=True)
    copy = spool / "slurm_script"
    copy.write_text(text)
    copy.chmod(stat.S_IRWXU)
    (spool / "environment").write_text(json.dumps(_environment(options)))

    work_dir = os.path.abspath(options.get("chdir", os.getcwd()))
    output = options.get("output", "slurm-%A_%a.out" if tasks else "slurm-%j.out")
    partition = options.get("partition", DEFAULT_PARTITION)
    limit = minutes(options["time"]) if "time" in options else None
    least, _, most = options.get("nodes", "1").partition("-")
    # Slurm counts the tasks of the fewest nodes then, and gives no more nodes than tasks.
    if "ntasks-per-node" in options:
        most = ""
    fields: dict[str, Any] = {
        "name": options.get("job-name", os.path.basename(script)),
        "user": os.environ.get("USER", "root"),
        "partition": partition,
        "command": " ".join([script, *arguments]) if script != "wrap" else "",
        "script": str(copy),
        "arguments": list(arguments),
        "environment": str(spool / "environment"),
        "work_dir": work_dir,
        "output": output,
        "error": options.get("error", output),
        "append": options.get("open-mode") == "append",
        "nodes": int(least),
        "most_nodes": int(most or 0),
        "tasks_per_node": int(options.get("ntasks-per-node", 1)),
        "cpus_per_task": int(options.get("cpus-per-task", 1)),
        "memory": options.get("mem", ""),
        "time_min": limit or PARTITIONS[partition].default_time_min,
        "submitted": time.time(),
        "requeues": "no-requeue" not in options,
        "dependency": options.get("dependency", ""),
        "kill_on_invalid_dependency": options.get("kill-on-invalid-dep") == "yes",
        "at_most": at_most,
        "comment": options.get("comment", ""),
        "excluded": _hosts(options.get("exclude", "")),
        "node_list": _hosts(options.get("nodelist", "")),
        "exclusive": "exclusive" in options,
        "held": "hold" in options,
        "begin": _begin(options.get("begin", "")),
        "nice": int(options.get("nice", 0)),
        "warning": _warning(options.get("signal", "")),
    }
    if not tasks:
        return [Job(id=first_id, **fields)]
    fields |= {"array": first_id, "array_tasks": len(tasks)}
    return [
        Job(id=job_id, task=task, **fields)
        for job_id, task in zip(ids, tasks, strict=True)
    ]


def _environment(options: Mapping[str, str]) -> dict[str, str]:
    """Returns what a job takes over from the environment of its submission."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(SLURMS_OWN)}
    export = options.get("export", "ALL")
    if not export.startswith("ALL"):
        kept = {"PATH", "HOME", "USER", "FAKE_SLURM", *export.split(",")}
        variables = {name: value for name, value in variables.items() if name in kept}
    if "cpus-per-task" in options:
        variables["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
    return variables


def _hosts(text: str) -> list[str]:
    return hostlist.expand(text) if text else []


def _array(text: str) -> tuple[list[int], int]:
    """Returns the indexes of "0-3%2", and how many may run at a time (0: all)."""
    indexes, _, at_most = text.partition("%")
    numbers = hostlist.expand_numbers(indexes) if indexes else []
    return [int(number) for number in numbers], int(at_most or 0)


def _megabytes(text: str) -> float:
    units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    return float(text.rstrip("KMGTB")) * units.get(text.rstrip("B")[-1], 1)


def minutes(text: str) -> int | None:
    """Returns the minutes of a time limit as sbatch reads it, None if it is none."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, days or "0"]):
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, mins, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, mins, seconds = numbers
    else:
        hours = 0
        mins, seconds = [*numbers, 0][:2]
    return int(days or 0) * 24 * 60 + hours * 60 + mins + (seconds > 0)


def _begin(text: str) -> float:
    """Returns the time of "now+1hour" or "now+5"; 0 for none."""
    if not text:
        return 0.0
    delay = text.removeprefix("now+")
    for unit, seconds in (("hour", 3600), ("minute", 60), ("day", 86400)):
        if unit in delay:
            return time.time() + seconds * int(delay.partition(unit)[0])
    return time.time() + int(delay)


def _warning(text: str) -> list[Any]:
    """Returns the number, the seconds before the limit and the scope of "B:USR2@90"."""
    if not text:
        return []
    scope = "batch" if text.startswith("B:") else "steps"
    name, _, seconds = text.removeprefix("B:").partition("@")
    return [int(signal.Signals[f"SIG{name}"]), int(seconds or 60), scope]


def _await_end(table: Table, job_id: int) -> int:
    """Waits for the end of a job or array; returns its highest exit code."""
    while True:
        jobs = [job for job in table.read() if job.is_named(str(job_id))]
        if all(job.has_ended for job in jobs):
            return max(
                job.exit_code or (job.signal and 128 + job.signal) for job in jobs
            )
        time.sleep(0.05)
