"""What the queue of a pending job looks like: one question to the controller, chosen by the reason
for which the job waits, and one to accounting."""

import getpass
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from slurmft.cluster.job_state import Report
from slurmft.cluster.slurm import commands
from slurmft.core.errors import SlurmftError
from slurmft.core.text import counted, duration, shown, some

_PAST = "now-30days"
"""How far back the user's own waits are looked at, in sacct's form."""
_ASK_AGAIN_S = 60
_FEWEST_WAITS = 5
"""Of fewer jobs, no quantiles are shown."""
# The signs at the end of a state: no response, powered off or on the way there or back, in
# maintenance, about to reboot, planned for a job of higher priority (sinfo(1)).
_AWAY = re.compile(
    "down|drain|drng|fail|maint|unk|no_respond|resv|power|boot|[*~#!%$@^-]$"
)
"""States of nodes that take no job, as `sinfo --format=%t` prints them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """How long the user's own jobs of a size have waited in a partition."""

    jobs: int
    median_s: float
    ninth_decile_s: float
    """Nine of ten jobs waited less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueFacts:
    """The queue of a pending job. None: not asked, or not known."""

    text: str | None = None
    """The answer of the controller in words: "12 pending job(s) before it, 2 of them yours"."""
    waits: Waits | None = None

    def lines(self) -> list[str]:
        """Returns a line for each fact."""
        lines = []
        if self.text:
            lines.append(self.text)
        if self.waits is not None:
            lines.append(
                f"your last {self.waits.jobs} jobs of this size waited "
                f"{duration(self.waits.median_s)} (median), nine of ten less than "
                f"{duration(self.waits.ninth_decile_s)}"
            )
        return lines


_answers: dict[tuple[str, Report], tuple[float, QueueFacts]] = {}
"""Job and its state -> when it was asked for, and the answer."""


def of_job(job: str, report: Report) -> QueueFacts:
    """Returns the facts about a pending job; those that Slurm does not give are absent. Programs
    that look again and again get the answer of the last minute."""
    asked_at, facts = _answers.get((job, report), (-math.inf, QueueFacts()))
    now = time.monotonic()
    if now - asked_at < _ASK_AGAIN_S:
        return facts
    facts = _ask(job, report)
    _answers[job, report] = (now, facts)
    return facts


def _ask(job: str, report: Report) -> QueueFacts:
    text = None
    for pattern, ask in _QUESTIONS:
        if re.match(pattern, report.reason):
            try:
                text = ask(job, report)
            # It is extra: the state is known without it.
            except (SlurmftError, ValueError):
                text = None
            # One question a job: each loads the controller.
            break
    return QueueFacts(text=text, waits=_waits(report))


# --- the controller -------------------------------------------------------------------------------


def _jobs_ahead(job: str, report: Report) -> str | None:
    """Counts the jobs of a higher priority, in the order in which Slurm looks at them."""
    # --array: without it, all pending tasks of an array are one line.
    options = ["--noheader", "--array", "--states=PENDING", "--sort=-p,i"]
    if report.partition:
        options.append(f"--partition={report.partition}")
    text = commands.call("squeue", *options, "--format=%i|%u")
    return parse_jobs_ahead(text, job, getpass.getuser())


def parse_jobs_ahead(text: str, job: str, user: str) -> str | None:
    """Reads lines of `squeue --sort=-p,i --format=%i|%u`, up to that of the job."""
    users: list[str] = []
    for line in text.splitlines():
        each, _, owner = line.strip().partition("|")
        if each == job:
            jobs_of_user = users.count(user)
            return (
                f"{len(users)} pending job(s) before it, {jobs_of_user} of them yours"
            )
        users.append(owner)
    return None


def _nodes(job: str, report: Report) -> str | None:
    options = ["--noheader"]
    if report.partition:
        options.append(f"--partition={report.partition}")
    text = commands.call("sinfo", *options, "--format=%t|%D")
    sentence = parse_nodes(text, report.partition, report.nodes)
    # Slurm names those that the job asks for, and cannot have.
    names = re.search(r"UnavailableNodes:(\S+)", report.reason)
    if sentence is not None and names is not None:
        sentence += f"; away are {shown(names[1])}"
    return sentence


def parse_nodes(text: str, partition: str, requested: int) -> str | None:
    """Reads lines of `sinfo --format=%t|%D`, one for each state of nodes."""
    nodes = Counter[str]()
    for line in text.splitlines():
        state, _, count = line.strip().partition("|")
        if _AWAY.search(state):
            nodes["away"] += int(count)
        # Not `mix`: jobs have some of the CPUs of such a node.
        elif state == "idle":
            nodes["idle"] += int(count)
        nodes["all"] += int(count)
    if not nodes["all"]:
        return None
    where = "the cluster"
    if partition:
        where = f"the partition {partition}"
    in_use = nodes["all"] - nodes["away"] - nodes["idle"]
    parts = [f"{nodes['idle']} are idle", f"{in_use} in use"]
    if nodes["away"]:
        parts.append(f"{nodes['away']} down, drained or reserved")
    needs = ""
    if requested:
        needs = f"; it needs {requested}"
    return f"of the {nodes['all']} nodes of {where} {', '.join(parts)}{needs}"


def _limits_of_partition(job: str, report: Report) -> str | None:
    if not report.partition:
        return None
    options = ["--noheader", f"--partition={report.partition}", "--format=%R|%s|%l"]
    return parse_partition_limits(commands.call("sinfo", *options), report.nodes)


def parse_partition_limits(text: str, requested: int) -> str | None:
    """Reads lines of `sinfo --format=%R|%s|%l`: each partition, the sizes of its jobs (1-2,
    1-infinite) and its time limit."""
    sentences = []
    # A partition has a line for each state of its nodes.
    for line in dict.fromkeys(text.splitlines()):
        name, sizes, time_limit = line.strip().split("|")
        _, _, most = sizes.rpartition("-")
        nodes = f"at most {most} node(s)"
        if most == "infinite":
            nodes = "any number of nodes"
        limit = f"for {time_limit}"
        if time_limit == "infinite":
            limit = "without a time limit"
        sentences.append(f"the partition {name} gives a job {nodes}, {limit}")
    if not sentences:
        return None
    return f"{', '.join(dict.fromkeys(sentences))}; it asks for {requested} node(s)"


def _licenses(job: str, report: Report) -> str | None:
    return parse_licenses(commands.call("scontrol", "--oneliner", "show", "licenses"))


def parse_licenses(text: str) -> str | None:
    """Reads `scontrol --oneliner show licenses`; returns those of which none is free."""
    licenses = re.findall(r"LicenseName=(\S+) Total=(\d+) Used=(\d+) Free=0\b", text)
    if not licenses:
        return None
    # Dozens may be there: the job's own are not in the answer.
    uses = [f"{used} of {total} {name}" for name, total, used in licenses]
    return f"licenses in use: {some(uses)}"


def _limited_jobs(job: str, report: Report) -> str | None:
    options = ["--noheader", "--array", "--states=PENDING,RUNNING", "--sort=-p,i"]
    text = commands.call("squeue", *options, "--format=%i|%T|%u|%a|%q|%D|%C|%r")
    return parse_limited_jobs(text, job)


def parse_limited_jobs(text: str, job: str) -> str | None:
    """Reads lines of `squeue --sort=-p,i --format=%i|%T|%u|%a|%q|%D|%C|%r`; returns which jobs of
    the user, account or QOS that the limit is of use it, and which wait before the job."""
    rows = [line.strip().split("|", 7) for line in text.splitlines()]
    own_row = next((row for row in rows if row[0] == job), None)
    if own_row is None:
        return None
    reason = own_row[7]
    # The association of a user and an account: MaxJobs, for instance, is one of the user.
    column, owner = 2, "you run"
    if re.match(r"QOSGrp", reason):
        column, owner = 4, f"the QOS {own_row[4]} runs"
    elif re.match(r"AssocGrp|\w*PerAccount", reason):
        column, owner = 3, f"the account {own_row[3]} runs"
    sharing = [row for row in rows if row[column] == own_row[column]]
    running = [row for row in sharing if row[1] == "RUNNING"]
    waiting = [row[0] for row in sharing if row[7] == reason and row[1] == "PENDING"]
    nodes = counted(sum(int(row[5]) for row in running), "node")
    cpus = counted(sum(int(row[6]) for row in running), "CPU")
    return (
        f"{owner} {counted(len(running), 'job')} on {nodes}, with {cpus}; "
        f"{waiting.index(job)} pending job(s) before it wait for the same limit"
    )


def _reservations(job: str, report: Report) -> str | None:
    text = commands.call("scontrol", "--oneliner", "show", "reservation")
    return parse_reservations(text)


def parse_reservations(text: str) -> str | None:
    """Reads `scontrol --oneliner show reservation`; returns the one that begins first."""
    fields = r"ReservationName=(\S+) StartTime=(\S+) EndTime=(\S+)"
    reservations = re.findall(fields, text)
    if not reservations:
        return None
    # Times as Slurm prints them sort as texts.
    name, start, end = min(reservations, key=lambda each: each[1])
    return (
        f"the reservation {name} is from {start.replace('T', ' ')} to "
        f"{end.replace('T', ' ')}"
    )


# In this order: a maintenance is one of the reasons that begin with ReqNodeNotAvail.
_QUESTIONS: Sequence[tuple[str, Callable[[str, Report], str | None]]] = (
    ("Priority", _jobs_ahead),
    (r"Reservation|ReqNodeNotAvail.*[Mm]aintenance", _reservations),
    (r"Resources|ReqNodeNotAvail|Nodes required|NodeDown", _nodes),
    (r"Partition(Node|Time)Limit", _limits_of_partition),
    ("Licenses", _licenses),
    (r"(Assoc|QOS)?(Grp|Max\w*Per(User|Account)|MaxJobs)", _limited_jobs),
)
"""Beginning of a reason -> the question that explains it."""


# --- accounting -----------------------------------------------------------------------------------


def _waits(report: Report) -> Waits | None:
    # Not since Submit: to wait for --begin or for another job says nothing about the queue.
    columns = "--format=Partition,NNodes,Eligible,Start"
    options = ["--noheader", "--parsable2", "--allocations", f"--starttime={_PAST}"]
    if report.partition:
        options.append(f"--partition={report.partition}")
    try:
        text = commands.call("sacct", *options, columns)
    except SlurmftError:
        return None
    return parse_waits(text, report.partition, report.nodes)


def parse_waits(text: str, partition: str, nodes: int) -> Waits | None:
    """Reads lines of `sacct -nPX --format=Partition,NNodes,Eligible,Start`.

    Args:
        text: the lines.
        partition: that of the job; "": all count.
        nodes: that of the job: those between half and twice as large count; 0: all do.
    """
    waits_s = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 4:
            continue
        name, count, eligible, start = fields
        if partition and name != partition:
            continue
        try:
            is_of_size = not nodes or nodes / 2 <= int(count) <= nodes * 2
            waited = datetime.fromisoformat(start) - datetime.fromisoformat(eligible)
        # "Unknown" of a job that has not started, "None" of one that never did.
        except ValueError:
            continue
        if is_of_size:
            waits_s.append(max(0.0, waited.total_seconds()))
    if len(waits_s) < _FEWEST_WAITS:
        return None
    # inclusive: else the ninth decile of few jobs may be longer than any of them has waited.
    deciles = statistics.quantiles(waits_s, n=10, method="inclusive")
    return Waits(
        jobs=len(waits_s),
        median_s=statistics.median(waits_s),
        ninth_decile_s=deciles[-1],
    )
