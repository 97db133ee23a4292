"""Attempts: from the start of a job to its end or requeue. Run on the job's first node, around the
tasks, by the batch script:

    MODULE begin RUN_DIR      prints what the tasks need to know
    MODULE avoid RUN_DIR      requeues the job to other hosts, if `begin` asks
    MODULE end RUN_DIR CODE   requeues the job or ends it

where MODULE is `python -m slurmft.cluster.slurm.batch_script`.
"""

from __future__ import annotations

import os
import sys

from slurmft.cluster.slurm import commands
from slurmft.core.errors import Exit, SlurmftError, run_main
from slurmft.core.files import read_json
from slurmft.node import rendezvous, signals
from slurmft.runs import log_times
from slurmft.runs.attempts import await_failure, begin, judge
from slurmft.runs.rundir import ATTEMPT, RunDir, current_attempt

AVOID = 76
"""Exit code of `begin` that asks for `avoid`."""


# --- on Slurm -------------------------------------------------------------------------------------


def begin_on_slurm(run: RunDir) -> int:
    """Prints shell assignments for the tasks: the attempt's number, and ports free on this node.

    Returns AVOID where Slurm gave hosts to this job that are to be left out.
    """
    hosts = rendezvous.expand_nodelist(os.environ["SLURM_JOB_NODELIST"])
    blame_lost_nodes(run)
    avoided = any(s.get("avoided") for s in run.history()[-1:])  # once, not for ever
    if set(hosts) & set(excludable_hosts(run)) and run.load_config().job.requeue and not avoided:
        return AVOID
    ports = rendezvous.free_ports(os.environ["SLURM_JOB_ID"])
    number = begin(run, hosts, commands.job_name(os.environ))
    print(f"{ATTEMPT}={number} {rendezvous.PORT_VARIABLE}={','.join(map(str, ports))}")
    return Exit.OK


def avoid_on_slurm(run: RunDir) -> int:
    """Requeues the job before it has begun: Slurm requeued it by itself, onto a bad host."""
    exclude = excludable_hosts(run)
    return requeue(run, f"{', '.join(exclude)} failed twice", exclude, avoided=True)


def excludable_hosts(run: RunDir) -> list[str]:
    """The hosts that failed twice, unless the job might find no place without them."""
    bad, job = run.bad_hosts(), run.load_config().job
    keys = {pair.lstrip("-").partition("=")[0] for pair in job.sbatch}
    if job.constraint or job.reservation or keys & {"nodelist", "exclude", "nodefile"}:
        return []
    name = os.environ.get("SLURM_JOB_PARTITION")
    size = next((p.nodes for p in commands.partitions() if p.name == name), 0)
    return bad if size - len(bad) >= job.nodes else []


def requeue(run: RunDir, reason: str, exclude: list[str], avoided: bool = False) -> int:
    """Sends the job of this process back to the queue; returns the exit code."""
    signals.block()  # Slurm's SIGTERM must not come between the two commands of a requeue
    without = f" (without {', '.join(exclude)})" if exclude else ""
    run.set_state("requeued", f"{reason}{without}", Exit.STOPPED, avoided=avoided)
    print(f"slurmft: requeue: {reason}{without}", file=sys.stderr, flush=True)
    try:
        warning = commands.requeue(commands.job_name(os.environ), exclude)
    except SlurmftError as error:
        run.set_state("failed", f"{reason}; Slurm refuses to requeue: {error.message}", error.code)
        raise
    if warning:
        print(f"slurmft: {', '.join(exclude)} could not be left out: {warning}", file=sys.stderr)
    return Exit.STOPPED


def blame_lost_nodes(run: RunDir) -> None:
    """Notes which nodes of the attempt before Slurm calls down: why that one ended."""
    before = read_json(run.attempt)
    if before is None or (run.history() or [{}])[-1].get("state") != "running":
        return
    for host in commands.down_hosts(before["hosts"]):
        lost = SlurmftError(f"node {host} was lost (Slurm calls it down)")
        run.add_failure(f"node {host}", lost, bad_host=host, attempt=before["number"])


def end_on_slurm(run: RunDir, code: int) -> int:
    """Requeues this script's own job, or returns its exit code."""
    state = commands.job_state(commands.job_name(os.environ))
    if code != Exit.OK and state is not None and state.name not in ("RUNNING", "UNKNOWN"):
        # Cancelled, timed out, or requeued already by whoever ended the tasks: not ours to decide.
        print(f"slurmft: the job is {state.name.lower()}", file=sys.stderr)
        return code
    await_failure(run, code)
    if run.is_superseded(current_attempt()):
        print("slurmft: a later attempt has begun: this one says nothing", file=sys.stderr)
        return code
    verdict = judge(run, code)
    if verdict.state == "requeued":
        return requeue(run, verdict.reason, excludable_hosts(run))
    run.set_state(verdict.state, verdict.reason, verdict.code)
    return verdict.code


def main(argv: list[str]) -> int:
    run = RunDir.open(argv[1])
    run.settle_permissions()
    if argv[0] == "begin":
        return begin_on_slurm(run)
    if argv[0] == "avoid":
        return avoid_on_slurm(run)
    return end_on_slurm(run, int(argv[2]))


if __name__ == "__main__":
    log_times.stamp_output("stderr")  # the batch script reads stdout
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
