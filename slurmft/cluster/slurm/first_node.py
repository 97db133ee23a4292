"""The commands that a job's batch script runs on the first node, around srun:

begin RUN_DIR      starts an attempt; prints shell assignments for the tasks
end RUN_DIR CODE   requeues the job, or records its end; ends with `commands.AGAIN` where the next
                   attempt is to begin in this allocation
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from slurmft.cluster import launcher
from slurmft.cluster.ending import cancelled_error
from slurmft.cluster.job_state import Report
from slurmft.cluster.ports import ports_of_attempt
from slurmft.cluster.slurm import commands, srun_log
from slurmft.cluster.slurm.batch_script import INODE
from slurmft.core import descent, permissions
from slurmft.core.config import JobConfig
from slurmft.core.errors import Exit, SlurmftError, one_line, run_main
from slurmft.core.run_files import ATTEMPT, Failure, current_attempt
from slurmft.core.text import some
from slurmft.core.trusted import NotOwnError
from slurmft.node import memory_kills, rendezvous, sealed, signals, supervisor
from slurmft.runs import hung_collective, log_times
from slurmft.runs.attempts import (
    SUPERSEDED,
    Outcome,
    attempts_without_progress,
    await_failure,
    begin,
    check_turn,
    decide,
    end,
    recovered,
    start_again,
    timed_out,
)
from slurmft.runs.job_ids import own_job_id
from slurmft.runs.rundir import RunDir

_LEAD_TIMES = 2
"""A job that ends sooner than so many times --stop-lead-s goes back to the queue at once."""
_ACCOUNTING_WAIT_S = 6
"""How long the end of a script waits for accounting: Slurm may kill it after `KillWait` seconds."""


def begin_attempt(run: RunDir) -> int:
    """Prints shell assignments for the tasks: attempt, hosts, secret, and ports free on this node.

    Where Slurm itself requeued the job onto hosts that are to be excluded, requeues it to others.
    """
    job = run.load_config().job
    job_id = own_job_id(os.environ)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if run.get_state().in_allocation and not may_start_again(run, job_id, restarts):
        return Exit.STOPPED
    # A process that was killed before it could record that the run has finished, may have left
    # that to this one.
    outcome = recovered(run)
    if outcome is not None and outcome.state == "finished":
        end(run, outcome)()
    try:
        check_turn(run, job_id, restarts)
    finally:
        # Also where this job must not run: the job that has the run may be recorded nowhere else.
        note_job(run)
    # Before the hosts are judged: a node that was lost counts against its host.
    blame_lost_nodes(run)
    exclude = excludable_hosts(run)
    history = run.history()
    # Once, not for ever: the job got these hosts again though they were excluded.
    was_avoided = bool(history) and history[-1].avoided
    hosts = hosts_to_use(run)
    has_bad_host = not set(hosts).isdisjoint(exclude)
    if has_bad_host and job.requeue and not was_avoided:
        reason = f"{', '.join(exclude)} failed before"
        return requeue(run, reason, exclude, avoided=True)
    # This is the first node, where the rendezvous will be.
    ports = ports_of_attempt(run)
    number = begin(run, hosts, job_id, restarts)
    host_list = ",".join(hosts)
    port_list = ",".join(str(port) for port in ports)
    print(f"{ATTEMPT}={number} {rendezvous.HOSTS}={host_list}")
    print(f"{rendezvous.NODE_COUNT}={len(hosts)}")
    print(f"{rendezvous.PORT_VARIABLE}={port_list}")
    print(f"{commands.WATCHER}={watcher_of_head(run, hosts)}")
    print(f"{sealed.SECRET}={sealed.new_secret()}")
    print(f"{INODE}={run.inode_of_own()}")
    return Exit.OK


def may_start_again(run: RunDir, job_id: str, restarts: int) -> bool:
    """Returns whether an attempt may begin that was to do so in the allocation of the one before;
    else the job is queued again, or over.

    Args:
        run: the run.
        job_id: the job of this process.
        restarts: how often Slurm has started it again.
    """
    last = run.read_attempt()
    has_moved = last is None or (last.job, last.restarts) != (job_id, restarts)
    is_over = not has_moved and is_ended_by_slurm(run)
    if has_moved or is_over:
        # Slurm has taken the allocation back meanwhile: it did queue the job again.
        run.set_state("requeued", "the job was queued again", Exit.STOPPED)
        return not is_over
    # Between two attempts a stop reaches no tasks. It shows in the time until the job is killed.
    if is_short_of_time(run.load_config().job.lead_s):
        requeue(run, "stopped before the next attempt has begun", [])
        return False
    return True


def note_job(run: RunDir) -> None:
    """Records the job that has the run, where another one is recorded: that was submitted, too, or
    the submission was interrupted."""
    with contextlib.suppress(OSError):  # a full disk does not end a run
        claim = descent.through(run.claims / str(run.submissions()))
        job_id = os.readlink(claim)
        job = run.read_job()
        if job is None or job.id != job_id:
            launcher.note_job(run, "slurm", job_id, launcher.location("slurm"))


def excludable_hosts(run: RunDir) -> list[str]:
    """Returns the hosts that failed twice, or a preflight; none if the job might not fit without
    them."""
    bad_hosts = run.bad_hosts()
    job = run.load_config().job
    # Where the user has restricted the hosts, how many are left is not known here.
    if _restricts_hosts(job):
        return []
    name = _partition()
    size = 0
    for partition in commands.partitions():
        if partition.name == name:
            size = partition.nodes
    if size - len(bad_hosts) < job.least_allocation:
        return []
    return bad_hosts


def _restricts_hosts(job: JobConfig) -> bool:
    """Returns whether the user has said on which hosts of a partition the job may run."""
    keys = set()
    for pair in job.sbatch:
        key, _, _ = pair.lstrip("-").partition("=")
        keys.add(key)
    names_hosts = keys & {"nodelist", "exclude", "nodefile"}
    return bool(job.constraint or job.reservation or names_hosts)


def _partition() -> str:
    """Returns the partition of this job. Of several that were asked for, Slurm has chosen it."""
    return os.environ.get("SLURM_JOB_PARTITION", "")


def record_out_of_memory(run: RunDir, killed_by: str) -> None:
    """Records that Slurm has killed a task for its memory, where the task could not: the next start
    takes less.

    Args:
        run: the run.
        killed_by: what ended the tasks, as Slurm says it.
    """
    failure = run.root_failure(current_attempt())
    is_explained = failure is not None and not failure.secondary
    if is_explained or not srun_log.is_out_of_memory(killed_by):
        return
    error = SlurmftError(killed_by, memory_kills.LESS_OR_MORE)
    error.out_of_memory = True
    run.add(Failure.of("as Slurm reports", error, retry=True))


def has_finished(run: RunDir, srun_says: Path) -> bool:
    """Returns whether the tasks of this attempt, for which Slurm reports that memory ran out, have
    ended well all the same.

    Args:
        run: the run.
        srun_says: the log of srun.
    """
    if run.result.exists():
        return True
    # A program of one's own need not record a result.
    attempt = current_attempt()
    tasks = srun_log.tasks_out_of_memory(srun_says, attempt)
    return bool(tasks) and all(run.ended_well(attempt, task).exists() for task in tasks)


def raised_memory(run: RunDir, killed_by: str, exclude: Sequence[str]) -> int | None:
    """Returns the memory a node (MiB) that the next start is to have, because this attempt had too
    little; None: as much as before. It is raised once between two submissions.

    Args:
        run: the run.
        killed_by: what ended the tasks, as Slurm says it.
        exclude: hosts that the next start is not to have.
    """
    failure = run.root_failure(current_attempt())
    if failure is None:
        return None
    # Counters of the kernel do not always tell why a rank was killed: Slurm may know.
    is_said_by_slurm = failure.retry and srun_log.is_out_of_memory(killed_by)
    if not failure.out_of_memory and not is_said_by_slurm:
        return None
    if run.get_state().raised_mem_mib_since_submission:
        return None
    job = run.load_config().job
    which = [f"--partition={_partition()}"]
    if _restricts_hosts(job):
        which.append(f"--nodes={os.environ.get('SLURM_JOB_NODELIST', '')}")
    # With more than the nodes have, the job would wait for ever.
    nodes = job.least_allocation + len(exclude)
    most_mib = commands.largest_memory_mib(nodes, *which)
    return job.raised_mem_mib(most_mib)


def requeue(
    run: RunDir,
    reason: str,
    exclude: list[str],
    avoided: bool = False,
    mem_mib: int | None = None,
) -> int:
    """Requeues the job of this process; returns the exit code.

    Args:
        run: the run.
        reason: why.
        exclude: hosts that the next start is not to have.
        avoided: the attempt has not begun, because of these hosts.
        mem_mib: the memory a node of the next start; None: as before.
    """
    # Slurm's SIGTERM must not come between the two commands of a requeue
    signals.block()
    full_reason = reason
    if exclude:
        full_reason += f" (without {', '.join(exclude)})"
    if mem_mib is not None:
        before = run.load_config().job.mem
        full_reason += f"; --mem {before} was too small: now {mem_mib} MiB a node"
    # Before Slurm requeues the job: afterwards this process may have no time to write.
    wait_for_plugins = run.set_state(
        "requeued",
        full_reason,
        Exit.STOPPED,
        avoided=avoided,
        raised_mem_mib=mem_mib,
    )
    print(f"slurmft: requeue: {full_reason}", file=sys.stderr, flush=True)
    try:
        warnings = commands.requeue(own_job_id(os.environ), exclude, mem_mib)
    # Else the record would say for ever that the job waits.
    except SlurmftError as error:
        refused = f"{reason}; Slurm refuses to requeue: {error.message}"
        run.set_state("failed", refused, error.code)()
        raise
    wait_for_plugins()
    for warning in warnings:
        print(f"slurmft: {warning}", file=sys.stderr)
        # The next start takes less then, and a resume does not ask for it.
        if warning.startswith(commands.NO_MORE_MEMORY):
            run.set_state(
                "requeued", reason, Exit.STOPPED, avoided=avoided, raised_mem_mib=0
            )()
    return Exit.STOPPED


def hosts_to_use(run: RunDir) -> list[str]:
    """Returns the hosts of this job's allocation that the next attempt is to have, in Slurm's
    order: without those that fail, as far as the others are enough."""
    job = run.load_config().job
    allocated = allocated_hosts(job)
    if not job.outlives_nodes:
        return allocated
    # This process runs on the first one, where the rendezvous will be.
    head = allocated[0]
    failing = failing_hosts(run, allocated)
    blamed = run.blamed_hosts(run.attempt_number())

    def flaws(host: str) -> tuple[bool, bool, bool]:
        return host != head, host in failing, host in blamed

    hosts = sorted(allocated, key=flaws)[: job.nodes]
    while len(hosts) > job.least_nodes and any(flaws(hosts[-1])[1:]):
        hosts.pop()
    return sorted(hosts, key=allocated.index)


def allocated_hosts(job: JobConfig) -> list[str]:
    """Returns the hosts that the job of this process has now, in Slurm's order."""
    nodes = ""
    if job.outlives_nodes:
        # Slurm takes a node that is down out of the job, but not out of its variables.
        with contextlib.suppress(SlurmftError):
            nodes = commands.allocated_nodes(own_job_id(os.environ))
    return commands.hostnames(nodes or os.environ["SLURM_JOB_NODELIST"])


def watcher_of_head(run: RunDir, hosts: list[str]) -> str:
    """Returns the host that is to watch the first one; "" where no other can, or where Slurm itself
    requeues the job of a node that dies.

    Args:
        run: the run.
        hosts: those of the attempt, which ends with any of them.
    """
    job = run.load_config().job
    if not job.outlives_nodes:
        return ""
    others = hosts[1:]
    if not others:
        spare_hosts = allocated_hosts(job)[1:]
        failing = failing_hosts(run, spare_hosts)
        others = [host for host in spare_hosts if host not in failing]
    if not others:
        return ""
    return others[-1]


def failing_hosts(run: RunDir, hosts: Sequence[str]) -> set[str]:
    """Returns which hosts Slurm takes for unwell, or failed twice, or failed a preflight."""
    failing = set(run.bad_hosts())
    # A controller that does not answer could not requeue the job, either.
    with contextlib.suppress(SlurmftError):
        failing |= commands.unwell_hosts(f"--nodes={','.join(hosts)}").keys()
    return failing.intersection(hosts)


def was_stopped(run: RunDir, code: int) -> bool:
    """Returns whether the tasks of an attempt were stopped from outside: who does so wants the
    nodes.

    Args:
        run: the run.
        code: of all tasks together.
    """
    # Where one task has failed, srun stops the others, whose code may be the largest.
    return code == Exit.STOPPED and run.get_state().reason != supervisor.TASK_FAILED


def is_short_of_time(time_s: int) -> bool:
    """Returns whether Slurm ends this script's job within this time, as far as it says so: at its
    time limit, or as others are to have the nodes."""
    left_s = commands.time_left_s(own_job_id(os.environ))
    return left_s is not None and left_s < time_s


def hosts_without_queue(run: RunDir) -> list[str]:
    """Returns the hosts on which the next attempt can begin in this allocation; none where the job
    is to go back to the queue."""
    job = run.load_config().job
    attempt = run.read_attempt()
    # A full disk records no attempts: then Slurm counts the starts.
    if attempt is None or attempt.number != current_attempt():
        return []
    hosts = hosts_to_use(run)
    # Slurm has given up the node of this script: another one requeues the job (`head_watch`).
    if hosts[:1] != attempt.hosts[:1]:
        return []
    # The nodes may be the reason, or what they share: with others it may go on.
    if hosts == attempt.hosts and attempts_without_progress(run) > 1:
        return []
    # A start needs time, too; the stop that comes before the time limit finds it ready to save.
    if is_short_of_time(_LEAD_TIMES * job.lead_s):
        return []
    if len(hosts) < job.least_nodes or failing_hosts(run, hosts):
        return []
    return hosts


def start_again_on(run: RunDir, reason: str, hosts: list[str]) -> int:
    """Records that the next attempt begins in this allocation, on these hosts; returns the exit
    code that has the batch script begin it."""
    where = "on the same nodes"
    attempt = run.read_attempt()
    if attempt is not None and hosts != attempt.hosts:
        where = f"on {some(hosts)}"
    start_again(run, reason, where)
    return commands.AGAIN


def blame_lost_nodes(run: RunDir, hosts: Sequence[str] = ()) -> None:
    """Records which nodes of the last attempt Slurm reports as down: why that attempt ended.

    Args:
        run: the run.
        hosts: further nodes that Slurm has given up.
    """
    attempt = run.read_attempt()
    if attempt is None or run.get_state().state not in ("running", "stopping"):
        return
    for host in sorted({*commands.down_hosts(attempt.hosts), *hosts}):
        where = f"node {host}"
        lost = SlurmftError("it was lost: Slurm reports it as down")
        run.add(Failure.of(where, lost, bad_host=host, attempt=attempt.number))


def end_attempt(run: RunDir, code: int) -> int:
    """Has the next attempt begin in this allocation, requeues this script's own job, or records its
    end; returns the exit code."""
    if code != Exit.OK and is_ended_by_slurm(run):
        return code
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    job_id = own_job_id(os.environ)
    srun_says = srun_log.path(run.submitit, job_id)
    job_log = run.submitit / f"{job_id}_0_log.err"
    # Slurm's own word on memory says more than the signal that srun saw.
    killed_by = (
        srun_log.over_limit(job_log)
        or srun_log.cause_of(srun_says, current_attempt())
        or srun_log.own_end(srun_says, current_attempt(), code)
    )
    # The first task that ended was killed: it has recorded nothing that could come late.
    if not killed_by:
        await_failure(run, code)
    # Slurm says so of every task of a step in which a process was killed for its memory, also where
    # the ranks have started again, taken less and finished.
    if srun_log.is_out_of_memory(killed_by) and has_finished(run, srun_says):
        code = Exit.OK
        killed_by = ""
    record_out_of_memory(run, killed_by)
    hung_collective.record(run, current_attempt())
    for nodes in srun_log.failed_nodes(srun_says, current_attempt()):
        blame_lost_nodes(run, commands.hostnames(nodes))
    outcome = decide(run, code, restarts, killed_by)
    if outcome.state == "requeued":
        exclude = excludable_hosts(run)
        mem_mib = raised_memory(run, killed_by, exclude)
        if not was_stopped(run, code) and mem_mib is None:
            hosts = hosts_without_queue(run)
            if hosts:
                return start_again_on(run, outcome.reason, hosts)
        failure = run.root_failure(current_attempt())
        if exclude or failure is None or not failure.exclude:
            return requeue(run, outcome.reason, exclude, mem_mib=mem_mib)
        # A host is certainly bad and cannot be excluded: the job would get it again.
        reason = f"{outcome.reason}; no other nodes can be had"
        outcome = Outcome("failed", reason, Exit.FAILED)
    wait_for_plugins = end(run, outcome)
    # A full disk or a lost file system takes no record: Slurm keeps the reason then.
    if outcome.state not in (SUPERSEDED, run.get_state().state):
        summary = f"{outcome.state}: {outcome.reason}"
        commands.note(own_job_id(os.environ), summary)
    wait_for_plugins()
    return outcome.code


def is_ended_by_slurm(run: RunDir) -> bool:
    """Returns whether this script's job was cancelled, has timed out, or was already requeued, so
    that there is nothing to decide; records an end for good."""
    state = commands.job_state(own_job_id(os.environ))
    if state is None or state.name in ("RUNNING", "UNKNOWN"):
        return False
    print(f"slurmft: the job is {state.name.lower()}", file=sys.stderr)
    record_end_by_slurm(run, state)
    return True


def record_end_by_slurm(run: RunDir, state: Report) -> None:
    """Records that Slurm ends this script's job for good, by scancel or its time limit, while there
    is time for that (KillWait). For another end the next look at the run is early enough."""
    job_id = own_job_id(os.environ)
    if state.name == "COMPLETING":
        # The queue does not say what has ended the job.
        state = commands.await_accounting(job_id, state, _ACCOUNTING_WAIT_S)
    if state.name == "CANCELLED":
        error = cancelled_error(job_id, state)
        wait_for_plugins = run.set_state("cancelled", error.message, error.code)
    elif state.name == "TIMEOUT":
        wait_for_plugins = end(run, timed_out(run))
    else:
        return
    wait_for_plugins()


def end_unread(run: RunDir, code: int, error: Exception) -> int:
    """Ends a job whose run cannot be read: requeues what has saved itself, else leaves the reason
    with Slurm. A folder that is gone gives nothing to resume."""
    reason = f"the run cannot be read at its end: {one_line(error)}"
    with contextlib.suppress(FileNotFoundError):
        # Raises where the folder is gone, and with it the checkpoint.
        os.stat(run.path)
        if code == Exit.STOPPED:
            return requeue(run, reason, [])
    print(f"error: {reason}", file=sys.stderr)
    commands.note(own_job_id(os.environ), f"failed: {reason}")
    return code or Exit.FAILED


def main(argv: list[str]) -> int:
    command, run_dir, *rest = argv
    try:
        run = RunDir.open(run_dir)
        permissions.settle(run.join().job.share_with_group)
    except (SlurmftError, OSError) as error:
        if command == "end":
            return end_unread(RunDir(Path(run_dir)), int(rest[0]), error)
        # The run is somebody else's, and takes no reason: Slurm keeps it.
        if isinstance(error, NotOwnError):
            commands.note(own_job_id(os.environ), f"failed: {one_line(error)}")
        raise
    if command == "begin":
        return begin_attempt(run)
    return end_attempt(run, int(rest[0]))


def run() -> NoReturn:
    """Runs the command of this process's arguments, and ends the process."""
    log_times.stamp_output("stderr")  # the batch script reads stdout
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))


if __name__ == "__main__":
    run()
