"""Slurm's commands: the calls, each beside a pure parser of its output.

Where a command is not here, fails, or does not answer in time, they raise SlurmftError; those that
do not, say what they return then.
"""

import contextlib
import dataclasses
import datetime
import functools
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurmft.cluster.job_state import NO_ACCOUNTING, NO_ANSWER, Report
from slurmft.core import descent, trusted
from slurmft.core.config import time_limit_min
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.text import counted, some
from slurmft.runs.job_ids import array_of, is_job_id, tasks_of

if TYPE_CHECKING:
    from subprocess import CompletedProcess

_TIMEOUT_S = 30
_SBATCH_TIMEOUT_S = 120
"""Longer: a job that sbatch submits after we have given up would run unknown to its run."""
_ACCOUNTING_LAG_S = 10
"""How long accounting may take to learn of an end that the controller knows."""
_MAX_ARRAY_SIZE = 1001
"""Slurm's default of MaxArraySize."""
_QUEUED_AGAIN = ("PENDING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED")
_KNOWS_NOTHING = re.compile(
    "invalid job id|accounting storage is disabled|sacct is not on the PATH",
    re.IGNORECASE,
)
"""Failures that are answers: there is no such job, or the site keeps no accounting."""
_JOBS_A_CALL = 5000
"""The ids are one argument, and the kernel takes none of more than 128 KiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """One partition, as sinfo shows it."""

    name: str
    state: str
    time_limit: str
    nodes: int
    cpus_per_node: str

    def __str__(self) -> str:
        size = f"{counted(self.nodes, 'node')} of {self.cpus_per_node} CPUs"
        return f"{self.name} ({size}, time limit {self.time_limit}, {self.state})"


def available() -> bool:
    """Returns whether this machine can submit to Slurm."""
    return shutil.which("sbatch") is not None


def partitions() -> list[Partition]:
    """Returns the cluster's partitions; none where sinfo does not answer."""
    try:
        # %R: with %P, the name of the default partition ends with a star.
        return parse_partitions(call("sinfo", "--noheader", "--format=%R|%a|%l|%D|%c"))
    except SlurmftError:
        return []


def parse_partitions(text: str) -> list[Partition]:
    """Reads lines of `sinfo --format=%R|%a|%l|%D|%c`."""
    partitions: dict[str, Partition] = {}
    for line in text.splitlines():
        name, state, limit, nodes, cpus = line.strip().split("|")
        node_count = int(nodes)
        if name in partitions:  # a line for each kind of node
            node_count += partitions[name].nodes
            if cpus != partitions[name].cpus_per_node:
                cpus = _smallest_of(cpus, partitions[name].cpus_per_node)
        partitions[name] = Partition(
            name=name,
            state=state,
            time_limit=limit,
            nodes=node_count,
            cpus_per_node=cpus,
        )
    return list(partitions.values())


def largest_memory_mib(nodes: int, *which: str) -> int:
    """Returns the most memory that so many nodes have each; 0 where that is unknown.

    Args:
        nodes: how many.
        which: options of sinfo for the nodes to choose from.
    """
    try:
        text = call("sinfo", "--noheader", "--exact", "--format=%D|%m", *which)
    except SlurmftError:
        return 0
    return parse_largest_memory(text, nodes)


def parse_largest_memory(text: str, nodes: int) -> int:
    """Reads lines of `sinfo --exact --format=%D|%m`: nodes, and the MiB that each has."""
    sizes = []
    for line in text.splitlines():
        match = re.fullmatch(r"(\d+)\|(\d+)\+?", line.strip(), re.ASCII)
        # A Slurm that says it in another way must not cost the requeue.
        if match is not None:
            sizes += [int(match[2])] * int(match[1])
    sizes.sort(reverse=True)
    if len(sizes) < nodes:
        return 0
    return sizes[nodes - 1]


def _smallest_of(*cpus: str) -> str:
    """Returns numbers of CPUs that differ as sinfo writes them: "4+"."""
    return min(cpus, key=lambda text: int(text.rstrip("+"))).rstrip("+") + "+"


def version() -> str:
    """Returns Slurm's version, as its commands print it: "slurm 22.05.8"."""
    return call("sinfo", "--version").strip()


def settings() -> dict[str, str]:
    """Returns the controller's settings, by their names in slurm.conf."""
    return parse_settings(call("scontrol", "show", "config"))


def parse_settings(text: str) -> dict[str, str]:
    """Reads `scontrol show config`; settings without a value are left out."""
    settings = {}
    for line in text.splitlines():
        # Headings of the output have no equals sign.
        name, equals, value = line.partition("=")
        if equals and value.strip() not in ("", "(null)"):
            settings[name.strip()] = value.strip()
    return settings


def cluster_name() -> str:
    """Returns the name of the cluster that Slurm's commands here belong to; "": unknown.

    SLURM_CLUSTERS names it for all of them. It is in a job's environment, too; elsewhere the
    controller is asked, once in a process.
    """
    name = os.environ.get(CLUSTERS) or os.environ.get("SLURM_CLUSTER_NAME", "")
    if not name and available():
        with contextlib.suppress(SlurmftError):
            name = _name_by_controller()
    return name.lower()  # as Slurm itself has it, however slurm.conf spells it


def check_cluster() -> None:
    """Raises UsageError where a variable would send the job to another cluster than the one that
    squeue and scancel speak to."""
    cluster = os.environ.get(CLUSTERS, "")
    if "," in cluster or cluster == "all":
        raise UsageError(
            f"{CLUSTERS}={cluster} names several clusters, of which sbatch would choose one",
            f"export {CLUSTERS} with the name of one",
        )
    of_sbatch = os.environ.get("SBATCH_CLUSTERS", cluster)
    if of_sbatch != cluster:
        raise UsageError(
            f"SBATCH_CLUSTERS={of_sbatch} is heeded by sbatch alone: nothing would find the job",
            f"unset SBATCH_CLUSTERS; export {CLUSTERS}={of_sbatch}",
        )


@functools.cache
def _name_by_controller() -> str:
    return settings().get("ClusterName", "")


def hostnames(nodelist: str) -> list[str]:
    """Returns the hosts of a list such as "n[1-3],m2", in the order in which Slurm counts them."""
    return call("scontrol", "show", "hostnames", nodelist).split()


def unwell_hosts(*options: str) -> dict[str, str]:
    """Returns the nodes that accept no jobs now -> state and reason; of all nodes, or of those that
    sinfo's options select."""
    columns = "--format=%N|%T|%E"
    return parse_unwell_hosts(call("sinfo", "--noheader", "--Node", columns, *options))


def parse_unwell_hosts(text: str) -> dict[str, str]:
    """Reads lines of `sinfo --Node --format=%N|%T|%E`, one for each partition of a node."""
    states = {}
    for line in text.splitlines():
        name, state, reason = line.strip().split("|", 2)
        # sinfo marks a node that does not respond by a star behind its state.
        is_silent = state.endswith("*")
        is_unwell = state.startswith(("down", "drain", "fail", "unknown"))
        if is_silent or is_unwell:
            states[name] = state
            if reason != "none":
                states[name] = f"{state}: {reason}"
    return states


def down_hosts(hosts: Sequence[str]) -> list[str]:
    """Returns which hosts Slurm reports as down or not responding ("mixed*"); none without an
    answer."""
    try:
        unwell = unwell_hosts(f"--nodes={','.join(hosts)}")
    except SlurmftError:
        return []
    down = []
    for name, description in unwell.items():
        state = description.partition(":")[0]
        if state == "down" or state.endswith("*"):
            down.append(name)
    return sorted(down)


def associations(user: str) -> list[dict[str, str]]:
    """Returns the limits of a user in accounting: a row for each account, by sacctmgr's names."""
    fields = "Account,Partition,QOS,MaxJobs,MaxSubmit,MaxTRES,MaxWall,GrpTRES"
    where = ("show", "assoc", f"user={user}", f"format={fields}")
    text = call("sacctmgr", "--noheader", "--parsable2", *where)
    return parse_associations(text, fields)


def parse_associations(text: str, fields: str) -> list[dict[str, str]]:
    """Reads lines of `sacctmgr --noheader --parsable2 show assoc format=FIELDS`."""
    names = fields.split(",")
    # A limit that is not set is an empty column.
    rows = []
    for line in text.splitlines():
        if line.strip():
            row = {}
            for name, value in zip(names, line.split("|"), strict=True):
                if value:
                    row[name] = value
            rows.append(row)
    return rows


def check_accounting() -> None:
    """Raises SlurmftError where sacct does not answer."""
    call("sacct", "-nX", "--starttime=now", "--format=JobID")


def job_state(job_id: str) -> Report | None:
    """Returns the state of a job: from the queue, else from accounting; None: neither knows it.

    NO_ANSWER: the controller, which may know the job, does not answer. NO_ACCOUNTING: it does not
    know the job any more, and accounting does not answer.
    """
    unanswered = set()
    outdated = None
    # The controller knows an ended job for some minutes, where a site keeps no accounting.
    for ask in (_state_in_queue, _state_in_accounting, _state_of_controller):
        try:
            state = ask(job_id)
        except SlurmftError as error:
            if not _KNOWS_NOTHING.search(error.message):
                unanswered.add(ask)
            continue
        # squeue shows an ended job for a moment, but not its exit code.
        if not state or (ask is _state_in_queue and state.ended):
            continue
        # Of a job that has left the queue, accounting learns that seconds later.
        if ask is _state_in_accounting and not state.ended and not unanswered:
            outdated = state
            continue
        return state
    if outdated is not None:
        return outdated
    # The controller has answered twice that it does not know the job.
    if not unanswered:
        return None
    if unanswered == {_state_in_accounting}:
        return NO_ACCOUNTING
    return NO_ANSWER


def allocated_nodes(job_id: str) -> str:
    """Returns the nodes that a running job has now, as a list of Slurm's: "n[1-3]"; "" of another
    job."""
    which = (f"--jobs={job_id}", "--states=RUNNING,SUSPENDED")
    return call("squeue", "--noheader", *which, "--format=%N").strip()


def time_left_s(job_id: str) -> int | None:
    """Returns how long a running job has until Slurm ends it, at its time limit or at the end of a
    preemption's GraceTime; None without a limit, or without an answer."""
    try:
        text = call("squeue", "--noheader", f"--jobs={job_id}", "--format=%L|%e")
    except SlurmftError:
        return None
    return parse_time_left(text, datetime.datetime.now())


def parse_time_left(text: str, now: datetime.datetime) -> int | None:
    """Reads the line of `squeue --format=%L|%e`, at a local time."""
    time_left, _, end = text.strip().partition("|")
    left_s = []
    with contextlib.suppress(ValueError):  # UNLIMITED
        days, _, clock = time_left.rpartition("-")
        clock_s = 0
        for part in clock.split(":"):  # 9:59, 1:00:00, 2-12:00:00
            clock_s = 60 * clock_s + int(part)
        left_s.append(86400 * int(days or 0) + clock_s)
    # That is by the limit alone. The end is sooner where others are to have the nodes.
    with contextlib.suppress(ValueError):  # NONE
        left_s.append(int((datetime.datetime.fromisoformat(end) - now).total_seconds()))
    return min(left_s, default=None)


def _state_in_queue(job_id: str) -> Report | None:
    text = call("squeue", "--noheader", f"--jobs={job_id}", "--format=%T|%r")
    return parse_squeue(text)


def _state_in_accounting(job_id: str) -> Report | None:
    # A task that never started is not found by its own id, only in the line of its array.
    text = call(*_SACCT, f"--jobs={array_of(job_id)}")
    return _of_task(parse_sacct_jobs(text), job_id)


def await_accounting(
    job_id: str, state: Report, lag_s: int = _ACCOUNTING_LAG_S
) -> Report:
    """Returns the end of a job as accounting has it, with who cancelled it; `state` where
    accounting does not learn of it in some seconds."""
    pauses_s = [1] * lag_s + [0]
    with contextlib.suppress(SlurmftError):  # the site keeps none
        for pause_s in pauses_s:
            report = _state_in_accounting(job_id)
            if report is not None and report.ended:
                return report
            time.sleep(pause_s)
    return state


def _state_of_controller(job_id: str) -> Report | None:
    facts = job_facts(job_id)
    if "JobState" not in facts:
        return None
    return Report(
        name=facts["JobState"],
        reason=_reason(facts.get("Reason", "")),
        exit_code=_exit_code(facts.get("ExitCode", "0:0")),
    )


_SQUEUE = (
    "squeue",
    "--noheader",
    "--array",
    "--states=all",
    "--format=%i|%T|%S|%r|%P|%D",
)
"""Ended jobs, too: the controller knows them for minutes, and earlier than accounting."""
_SACCT = ("sacct", "-nPX", "--format=JobID,State,ExitCode")


def job_states(
    job_ids: Iterable[str], only_queued: Iterable[str] = ()
) -> dict[str, Report]:
    """Returns the states of many jobs and array tasks, by one squeue and at most one sacct for
    every 5,000 of them.

    A job that neither knows is left out. NO_ANSWER is the state of all jobs if the controller does
    not answer, NO_ACCOUNTING of those that only accounting may know. Accounting is not queried for
    `only_queued`.
    """
    # another text would fail the whole call
    valid_ids = set(filter(is_job_id, job_ids))
    queued = _states_by(_SQUEUE, parse_squeue_jobs, valid_ids)
    if queued is None:
        return dict.fromkeys(valid_ids, NO_ANSWER)
    left = valid_ids - queued.keys() - set(only_queued)
    # Who cancelled a job is known to accounting alone.
    unexplained = set()
    for job in valid_ids - set(only_queued):
        if job in queued and queued[job].name == "CANCELLED":
            unexplained.add(job)
    ended = _states_by(_SACCT, parse_sacct_jobs, left | unexplained)
    if ended is None:
        ended = dict.fromkeys(left, NO_ACCOUNTING)
    reports = {}
    for job in valid_ids:
        report = queued.get(job)
        if report is None or job in unexplained:
            in_accounting = _of_task(ended, job)
            # It may not have heard of the end yet.
            if report is None or (in_accounting and in_accounting.ended):
                report = in_accounting
        if report is not None:
            reports[job] = report
    return reports


@dataclass(frozen=True, kw_only=True, slots=True)
class JobUse:
    """The resources of one start of a job, as accounting has them."""

    elapsed_s: int
    nodes: int
    cpus: int
    gpus: int
    memory_bytes: int
    """Allocated, or asked for, on all nodes."""
    peak_bytes: int
    """The most that a task took; 0: unknown."""
    energy_j: int
    """0: unknown."""


_SACCT_USES = (
    # Without --duplicates, sacct shows the last start of a requeued job alone.
    *("sacct", "-nP", "--duplicates"),
    "--format=JobID,ElapsedRaw,ReqTRES,AllocTRES,MaxRSS,ConsumedEnergyRaw",
)


def job_uses(job_ids: Iterable[str]) -> dict[str, list[JobUse]]:
    """Returns the resources that each start of jobs used, requeued ones included, oldest first."""
    ids = sorted(filter(is_job_id, job_ids))
    uses: dict[str, list[JobUse]] = {}
    for begin in range(0, len(ids), _JOBS_A_CALL):
        some_ids = ids[begin : begin + _JOBS_A_CALL]
        jobs = f"--jobs={','.join(some_ids)}"
        # Not for long: a run has records of its own in place of an answer that does not come.
        uses |= parse_job_uses(call(*_SACCT_USES, jobs, timeout_s=10))
    return uses


def parse_job_uses(text: str) -> dict[str, list[JobUse]]:
    """Reads lines of `sacct -nP --duplicates`: each start's line, then those of its steps."""
    uses: dict[str, list[JobUse]] = {}
    for line in text.splitlines():
        if line.count("|") != 5:
            continue
        job_id, elapsed, requested, allocated, peak, energy = line.split("|")
        job, _, step = job_id.partition(".")
        starts = uses.setdefault(job, [])
        if step and starts:
            # Slurm measures memory for steps only; the peak of a start is that of its largest step.
            last = starts[-1]
            peak_bytes = max(last.peak_bytes, _bytes(peak))
            starts[-1] = dataclasses.replace(last, peak_bytes=peak_bytes)
        elif not step:
            # Of memory that sites do not allocate, the request is all that is known.
            resources = _resources(requested) | _resources(allocated)
            # Where Slurm measures none, the column may be empty.
            energy_j = 0
            if energy.isdecimal():
                energy_j = int(energy)
            use = JobUse(
                elapsed_s=int(elapsed or 0),
                nodes=int(resources.get("node", 0)),
                cpus=int(resources.get("cpu", 0)),
                gpus=int(resources.get("gres/gpu", 0)),
                memory_bytes=_bytes(resources.get("mem", "")),
                peak_bytes=_bytes(peak),
                energy_j=energy_j,
            )
            starts.append(use)
    return uses


def _resources(text: str) -> dict[str, str]:
    """ "cpu=4,mem=8G,node=1" -> {"cpu": "4", "mem": "8G", "node": "1"}"""
    amounts = {}
    for resource in text.split(","):
        name, equals, amount = resource.partition("=")
        if equals:
            amounts[name] = amount
    return amounts


def _bytes(text: str) -> int:
    """ "512K", "1.50G", "" -> bytes; accounting's K are KiB."""
    match = re.fullmatch(r"([\d.]+)([KMGTP]?)", text)
    if match is None:
        return 0
    exponent = " KMGTP".index(match[2] or " ")
    return int(float(match[1]) * 1024**exponent)


def _of_task(reports: dict[str, Report], job_id: str) -> Report | None:
    """Returns the state of a job by its own line, or its array's: accounting has only that at first
    where the array was cancelled before it started."""
    array = array_of(job_id)
    return reports.get(job_id) or reports.get(array)


def _states_by(
    command: Sequence[str],
    parse: Callable[[str], dict[str, Report]],
    job_ids: Iterable[str],
) -> dict[str, Report] | None:
    """Asks one command for the states of jobs, in pieces; None where it does not answer."""
    # Whole arrays: see `_of_task`.
    ids = sorted({array_of(job) for job in job_ids})
    reports: dict[str, Report] = {}
    for begin in range(0, len(ids), _JOBS_A_CALL):
        some_ids = ids[begin : begin + _JOBS_A_CALL]
        jobs = f"--jobs={','.join(some_ids)}"
        try:
            reports |= parse(call(*command, jobs))
        except SlurmftError as error:
            # squeue fails so where it knows none of the jobs, sacct where the site has none.
            if not _KNOWS_NOTHING.search(error.message):
                return None
    return reports


def parse_squeue_jobs(text: str) -> dict[str, Report]:
    """Reads lines of `squeue --array --format=%i|%T|%S|%r|%P|%D`: job id, or array_index, ->
    state."""
    reports = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        fields += [""] * (6 - len(fields))  # absent ones are empty
        job, name, start, reason, partition, nodes = fields[:6]
        report = parse_squeue(f"{name}|{reason}")
        if report is None:
            continue
        if name == "PENDING":
            expected_start = start
            if start == "N/A":
                expected_start = ""
            report = dataclasses.replace(
                report,
                expected_start=expected_start,
                partition=partition,
                nodes=_fewest_nodes(nodes),
            )
        reports[job] = report
    return reports


def _fewest_nodes(text: str) -> int:
    """Returns the number of nodes that a job asks for, the smaller one of "2-4"; 0: unknown."""
    match = re.match(r"\d+", text)
    if match is None:
        return 0
    return int(match[0])


def parse_sacct_jobs(text: str) -> dict[str, Report]:
    """Reads lines of `sacct -nPX --format=JobID,State,ExitCode`; the last line of a job counts.

    Tasks of an array that never started share one line, such as 5_[0-2,4-9%4]; it still has those
    that started later, beside lines of their own.
    """
    by_own_line: dict[str, Report] = {}
    by_shared_line: dict[str, Report] = {}
    for line in text.splitlines():
        job, _, rest = line.strip().partition("|")
        report = parse_sacct(rest)
        if report is None:
            continue
        if "[" in job:
            by_shared_line |= dict.fromkeys(tasks_of(job), report)
        else:
            by_own_line[job] = report
    return by_shared_line | by_own_line


def parse_squeue(text: str) -> Report | None:
    """Reads the line of `squeue --format=%T|%r`."""
    name, _, reason = text.strip().partition("|")
    if not name:
        return None
    return Report(name=name, reason=_reason(reason))


def _reason(text: str) -> str:
    """Returns a reason for waiting; Slurm writes "None" where there is none."""
    if text == "None":
        return ""
    return text


def parse_sacct(text: str) -> Report | None:
    """Reads State and ExitCode in a line of `sacct -nPX`."""
    state, _, code = text.strip().partition("|")
    if not state:
        return None
    name, _, reason = state.partition(" ")  # "CANCELLED by 1000"
    return Report(name=name, reason=reason, exit_code=_exit_code(code))


def _exit_code(text: str) -> int:
    """ "1:0" -> 1, "0:15" -> 143: code and signal, as accounting writes them."""
    code, _, signal = text.strip().partition(":")
    if int(code or 0):
        return int(code)
    if int(signal or 0):
        return 128 + int(signal)
    return 0


def cancel(*job_ids: str) -> None:
    """Cancels jobs, in this order."""
    call("scancel", *job_ids)


def sbatch(arguments: Sequence[str], script: str) -> str:
    """Submits a script; returns the id of its job. Of a refusal, the error has what sbatch
    printed."""
    # Not by `call`: a refusal is shown in sbatch's words, and it has more time.
    command = ["sbatch", "--parsable", *arguments, script]
    hint = "it may have submitted the job nevertheless: look at squeue --me"
    done = _run(command, _SBATCH_TIMEOUT_S, hint, os.environ)
    if done.returncode:
        raise refusal(done.stderr, done.returncode)
    # "12", or "12;cluster".
    job_id, _, _ = done.stdout.strip().partition(";")
    return job_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """The CPUs that Slurm would give a job."""

    cpus: int
    """On all its nodes."""
    cpus_per_node: int
    """All CPUs of a node of the partition, the smallest one."""


def grant(arguments: Sequence[str]) -> Grant | None:
    """Returns the CPUs that a job with these options would get; None where sbatch does not say."""
    command = ("sbatch", "--test-only", *arguments, "--wrap", "true")
    with contextlib.suppress(SlurmftError):
        done = _run(command, _TIMEOUT_S, "is the Slurm controller up?", os.environ)
        if not done.returncode:
            return parse_grant(done.stderr, partitions())
    return None


def parse_grant(text: str, partitions: Sequence[Partition]) -> Grant | None:
    """Reads what `sbatch --test-only` prints."""
    pattern = r"using (\d+) processors on (?:nodes )?\S+ in partition (\S+)"
    match = re.search(pattern, text)
    if match is None:
        return None
    cpus, name = match.groups()
    for partition in partitions:
        if partition.name == name:
            cpus_per_node = int(partition.cpus_per_node.rstrip("+"))
            return Grant(cpus=int(cpus), cpus_per_node=cpus_per_node)
    return None


def script_argument(script: Path) -> str:
    """Returns the path by which sbatch reads a script: where others could put theirs in its place,
    through the folder that this process holds."""
    if trusted.renaming_on_the_way(script) is None:
        return str(script)
    return trusted.for_children(descent.through(script))


def job_of_script(folder: Path) -> str:
    """Returns the queued job of this user whose script lies in a folder; "": there is none."""
    text = call("squeue", "--noheader", "--me", "--format=%i|%o")
    return parse_job_of_script(text, folder)


def parse_job_of_script(text: str, folder: Path) -> str:
    """Reads lines of `squeue --format=%i|%o`."""
    names = []
    with contextlib.suppress(OSError):
        names = os.listdir(descent.through(folder))
    for line in text.splitlines():
        job, _, script = line.strip().partition("|")
        # The name is random: see `script_argument`.
        is_held = script.startswith("/proc/") and os.path.basename(script) in names
        if script.startswith(f"{folder}/") or is_held:
            return job
    return ""


def max_array_size() -> int:
    """Returns how many tasks a job array may have here (MaxArraySize); where that is unknown,
    Slurm's default: sbatch checks it."""
    with contextlib.suppress(SlurmftError, ValueError):
        size = int(settings().get("MaxArraySize", _MAX_ARRAY_SIZE))
        # 0: the site allows no arrays, and sbatch says so.
        return max(1, size)
    return _MAX_ARRAY_SIZE


def job_facts(job: str) -> dict[str, str]:
    """Returns what the controller knows of a job, by scontrol's names."""
    return parse_job_facts(call("scontrol", "show", "job", job))


def parse_job_facts(text: str) -> dict[str, str]:
    """Reads `scontrol show job`. A line with free text is one value, as this may hold anything."""
    facts = {}
    for line in text.splitlines():
        line = line.strip()
        pairs = line.split()
        if line.startswith(_FREE_TEXT):
            pairs = [line]
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if equals and value not in ("", "(null)", "N/A"):
                facts[name] = value
    return facts


_FREE_TEXT = (
    "JobId=",
    "Command=",
    "WorkDir=",
    "Comment=",
    "AdminComment=",
    "StdErr=",
    "StdIn=",
    "StdOut=",
)


NO_MORE_MEMORY = "the job gets no more memory"
"""How a warning of `requeue` begins where Slurm refuses another size of memory."""


def requeue(
    job: str, exclude: Sequence[str] = (), mem_mib: int | None = None
) -> list[str]:
    """Requeues a running job, to run on other hosts than those in `exclude`, and with another size
    of memory a node; returns warnings, where the job is queued but that could not be. Tries for
    minutes.

    Slurm then sends SIGTERM to the job's processes: a caller that is one of them must block it.
    """
    # A run must not be lost because the controller is just restarting.
    for pause_s in (1, 5, 15, 30, 60, 0):
        try:
            call("scontrol", "requeue", job)
            break
        except SlurmftError:
            state = job_state(job)
            if state is not None and state.name in _QUEUED_AGAIN:
                break  # by somebody else, at the same moment
            if not pause_s:
                raise
            time.sleep(pause_s)
    # After the requeue: Slurm changes them of a pending job only.
    changes = {}
    if exclude:
        host_list = ",".join(exclude)
        changes[f"{host_list} could not be excluded"] = f"ExcNodeList={host_list}"
    if mem_mib is not None:
        changes[NO_MORE_MEMORY] = f"MinMemoryNode={mem_mib}"
    warnings = []
    for warning, change in changes.items():
        try:
            call("scontrol", "update", f"JobId={job}", change)
        except SlurmftError as error:
            warnings.append(f"{warning}: {error.message}")
    return warnings


CLUSTERS = "SLURM_CLUSTERS"
"""Variable with the cluster that Slurm's commands speak to, where it is not that of their host."""
AGAIN = 79
"""Exit code of `first_node end` where the next attempt is to begin in the same allocation; none of
slurmft's own exit codes is that."""
WATCHER = "SLURMFT_WATCHER"
"""Variable with the host that watches the first one (`head_watch`); "": there is no other."""
NOTE = "slurmft: "
"""How a job's comment begins that slurmft has left there."""


def note(job: str, words: str) -> None:
    """Leaves words with the job of this process, as its comment: the run takes none."""
    # A comment is one line of `scontrol show job`.
    line = " ".join(words.split())
    with contextlib.suppress(SlurmftError):
        call("scontrol", "update", f"JobId={job}", f"Comment={NOTE}{line}")


def noted(job: str) -> str:
    """Returns the words that `note` has left; "" if there are none, or the controller has forgotten
    the job."""
    with contextlib.suppress(SlurmftError):
        # Users and plug-ins of the site write comments, too: ours is known by its beginning.
        comment = job_facts(job).get("Comment", "")
        if comment.startswith(NOTE):
            return comment.removeprefix(NOTE)
    return ""


def call(*command: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Returns the output of a command of Slurm's."""
    # 0: no limit. By default Slurm cuts a long list of array tasks short. Users may choose the
    # format of times.
    environment = os.environ | {
        "SLURM_BITSTR_LEN": "0",
        "SLURM_TIME_FORMAT": "standard",
    }
    done = _run(command, timeout_s, "is the Slurm controller up?", environment)
    if done.returncode:
        printed = done.stderr.strip()
        message = f"{command[0]} failed (exit {done.returncode}): {printed}"
        raise SlurmftError(message, code=Exit.SUBMIT)
    return done.stdout


def _run(
    command: Sequence[str], timeout_s: float, hint: str, environment: Mapping[str, str]
) -> "CompletedProcess[str]":
    import subprocess  # 3 ms: `status` of a run that has ended asks nobody

    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            # Names of jobs, of anybody's, need not be UTF-8, and what is read here is recorded.
            errors="backslashreplace",
            timeout=timeout_s,
            env=environment,
            check=False,
            # A signal to the group of this process, such as Ctrl-C, must not come in the middle of
            # a submission.
            start_new_session=True,
        )
    except FileNotFoundError:
        message = f"{command[0]} is not on the PATH"
        raise SlurmftError(message, code=Exit.SUBMIT) from None
    except OSError as error:
        message = f"{command[0]}: {error.strerror}"
        raise SlurmftError(message, code=Exit.SUBMIT) from None
    except subprocess.TimeoutExpired:
        message = f"{command[0]} did not answer within {timeout_s:.0f} s"
        raise SlurmftError(message, hint, Exit.SUBMIT) from None


def check_starts(job_id: str) -> None:
    """Cancels a pending job that requests more than its partition has, and raises SlurmftError."""
    # After sbatch has taken it: then Slurm has said why the job waits.
    reason = never_starts(job_id)
    if reason:
        cancel(job_id)
        raise SlurmftError(
            f"Slurm would never start the job: {reason}", offers(), Exit.SUBMIT
        )


def never_starts(job_id: str) -> str | None:
    """Returns why a pending job requests more than its partition has; None where it does not.

    On most sites sbatch accepts such jobs, and they wait forever. Slurm's reason alone is not
    enough: PartitionNodeLimit may mean nodes that are down for an hour.
    """
    columns = "--format=%T|%r|%P|%D|%l|%C"
    try:
        text = call("squeue", "--noheader", f"--jobs={job_id}", columns)
    # Slurm has taken the job: whether it ever starts is not worth a failure.
    except SlurmftError:
        return None
    return parse_never_starts(text, partitions())


def parse_never_starts(text: str, partitions: list[Partition]) -> str | None:
    """Reads the line of `squeue --format=%T|%r|%P|%D|%l|%C`, and compares it with the
    partitions."""
    if text.count("|") != 5:  # the job is gone, or has several lines, as a begun array
        return None
    state, reason, name, nodes, limit, cpus = text.strip().split("|")
    by_name = {partition.name: partition for partition in partitions}
    # A job that may run in several partitions ("a,b") is in none of them by name, and not judged.
    partition = by_name.get(name)
    if state != "PENDING" or partition is None:
        return None
    # Nodes that are down count in a partition's size: they may come back.
    size = partition.nodes
    if int(nodes) > size:
        offer = f"the partition {name} has {size}"
        return f"it requests {nodes} nodes, but {offer} ({reason})"
    if _minutes(limit) > _minutes(partition.time_limit):
        return (
            f"it requests a time of {limit}, but the partition {name} allows "
            f"{partition.time_limit} ({reason})"
        )
    cpus_a_node = math.ceil(int(cpus) / int(nodes))
    # "4+" stands for nodes of several sizes: whether one of them has enough is not known.
    if (
        reason == "PartitionConfig"
        and partition.cpus_per_node.isdecimal()
        and cpus_a_node > int(partition.cpus_per_node)
    ):
        return (
            f"it requests {cpus_a_node} CPUs a node, but those of the partition {name} have "
            f"{partition.cpus_per_node} ({reason})"
        )
    return None


def _minutes(limit: str) -> float:
    """Converts a time limit that squeue or sinfo printed; infinity for UNLIMITED and anything
    unknown."""
    try:
        return time_limit_min(limit)
    except SlurmftError:
        return math.inf


def refusal(stderr: str, exit_code: int) -> SlurmftError:
    """Returns the error for a job that sbatch refused: its output, and the cluster's partitions."""
    # sbatch says the same in two lines: what is wrong, and what it could not do.
    text = "; ".join(filter(None, error_text(stderr.splitlines())))
    cures = [cure for words, cure in _CURES_OF_OPTIONS.items() if words in text]
    # No partition has to do with how an option is written.
    hint = "; ".join(cures) or offers()
    for words, (what, field) in _LOOK_UP.items():
        if words in text:
            hint += f"; {what} of their nodes: sinfo -o '%P %D {field}'"
            break
    return SlurmftError(
        f"sbatch refused the job (exit {exit_code}): {text or 'it gave no reason'}",
        hint,
        Exit.SUBMIT,
    )


_CURES_OF_OPTIONS = {
    "doesn't allow an argument": "give it by its name alone: --sbatch NAME",
    "requires an argument": "give it with a value: --sbatch NAME=VALUE",
    "unrecognized option": "this sbatch has no such option: sbatch --help lists them",
}
"""Words of getopt, by which sbatch reads its options -> what to do."""
_LOOK_UP = {
    "generic resource": ("GPUs", "%G"),
    "Memory specification": ("MiB of memory", "%m"),
    "node configuration": ("CPUs, MiB of memory, GPUs and features", "%c %m %G %f"),
}
"""Words of sbatch -> what it was that no node has, and the field of sinfo that shows it."""


def offers(otherwise: str = " Without it: --cluster local") -> str:
    """Returns the partitions of the cluster, as a hint.

    Args:
        otherwise: what to do where there are none, for commands that can do without Slurm.
    """
    descriptions = some([str(partition) for partition in partitions()])
    if not descriptions:
        return f"sinfo shows no partitions: is Slurm up?{otherwise}"
    return f"partitions here: {descriptions}"


def error_text(lines: Sequence[str]) -> list[str]:
    """Returns lines of sbatch or salloc without the name of the command."""
    prefix = re.compile("^(sbatch: |salloc: )?(error: )?")
    return [prefix.sub("", line).strip() for line in lines]
