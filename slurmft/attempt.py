"""Attempts: from the start of a job to its end or requeue. Run on the job's first node, around the
tasks, by the batch script:

    python -m slurmft.attempt begin RUN_DIR         prints what the tasks need to know
    python -m slurmft.attempt avoid RUN_DIR         requeues the job to other hosts, if `begin` asks
    python -m slurmft.attempt end RUN_DIR CODE      requeues the job or ends it
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from dataclasses import dataclass

from slurmft import rendezvous, signals, slurm, stamps
from slurmft.errors import Exit, SlurmftError, run_main
from slurmft.rundir import ATTEMPT, RunDir, current_attempt, read_json, write_json

AVOID = 76
"""Exit code of `begin` that asks for `avoid`."""

_FILE_LAG_S = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a run after an attempt."""

    state: str
    """finished, failed, cancelled or requeued."""
    reason: str
    code: int


def begin(run: RunDir, hosts: list[str], job: str) -> int:
    """Opens an attempt; returns its number.

    Raises:
        SlurmftError: the attempts before made no progress.
    """
    number = run.attempt_number() + 1
    settings = run.load_config().job
    stalled = attempts_without_progress(run)
    if stalled > settings.max_requeues:  # Slurm requeues after a node's death without asking us
        verdict = _no_progress(stalled, "the last attempt ended without a word")
        run.set_state(verdict.state, verdict.reason, verdict.code)
        raise SlurmftError(verdict.reason, _resume_hint(run))
    now = {"number": number, "job": job, "hosts": hosts, "time": time.time()}
    write_json(run.attempt, now)
    where = f"on {', '.join(hosts)}"
    restart = f"attempt {number} {where}" if number > 1 else where
    run.set_state("running", restart, attempt=number, checkpoint=newest_checkpoint(run))
    return number


def end(run: RunDir, code: int) -> Verdict:
    """Decides what becomes of a run whose tasks have ended, and records it."""
    verdict = judge(run, code)
    run.set_state(verdict.state, verdict.reason, verdict.code)
    return verdict


def judge(run: RunDir, code: int) -> Verdict:
    """The verdict over an attempt, from its exit code and the failures it left."""
    failure = run.root_failure()
    if code == Exit.OK:
        return Verdict("finished", "", Exit.OK)
    if run.get_state()["state"] == "cancelled":
        return Verdict("cancelled", run.get_state()["reason"], Exit.CANCELLED)
    # Where ranks only lost their neighbours, a node may have gone without a word.
    own = failure is not None and not failure["retry"] and not failure["echo"]
    if code != Exit.STOPPED and failure and own:
        return Verdict("failed", f"{failure['where']}: {failure['message']}", failure["code"])
    by_itself = failure is None and code not in (Exit.STOPPED, *range(128, 256))
    if by_itself and newest_checkpoint(run) is None:  # its tasks never came so far as to say why
        return Verdict("failed", f"the tasks ended with code {code}", code)
    stopped = f"stopped; {saved(run)}"
    reason = stopped if code == Exit.STOPPED else f"the tasks ended with code {code}"
    if failure and code != Exit.STOPPED:
        reason = f"{failure['where']}: {failure['message']}"
    settings = run.load_config().job
    stalled = attempts_without_progress(run)
    if not settings.requeue:
        return Verdict("failed", f"{reason}; not requeued (--no-requeue)", Exit.STOPPED)
    if stalled > settings.max_requeues:
        return _no_progress(stalled, reason, failure["code"] if failure else Exit.FAILED)
    return Verdict("requeued", reason, Exit.STOPPED)


def attempts_without_progress(run: RunDir) -> int:
    """How many attempts in a row, the last one included, have left no new checkpoint."""
    newest, count = newest_checkpoint(run), 0
    for state in reversed(run.history()):
        if state["state"] == "submitted":
            break
        if state["state"] == "running":
            if state.get("checkpoint") != newest:
                break
            count += 1
    return count


def saved(run: RunDir) -> str:
    """What a stopped run can go on from, in words."""
    return f"the newest checkpoint is {newest_checkpoint(run) or 'none: it will start anew'}"


def newest_checkpoint(run: RunDir) -> str | None:
    return next(reversed(run.checkpoint_names()), None)


def _no_progress(stalled: int, reason: str, code: int = Exit.FAILED) -> Verdict:
    times = "in this attempt" if stalled == 1 else f"in {stalled} attempts"
    return Verdict("failed", f"{reason}; no new checkpoint {times} (--max-requeues)", code)


def _resume_hint(run: RunDir) -> str:
    return f"look into {run.logs}; then: slurmft resume {shlex.quote(str(run.path))}"


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
    number = begin(run, hosts, slurm.job_name(os.environ))
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
    size = next((p.nodes for p in slurm.partitions() if p.name == name), 0)
    return bad if size - len(bad) >= job.nodes else []


def requeue(run: RunDir, reason: str, exclude: list[str], avoided: bool = False) -> int:
    """Sends the job of this process back to the queue; returns the exit code."""
    signals.block()  # Slurm's SIGTERM must not come between the two commands of a requeue
    without = f" (without {', '.join(exclude)})" if exclude else ""
    run.set_state("requeued", f"{reason}{without}", Exit.STOPPED, avoided=avoided)
    print(f"slurmft: requeue: {reason}{without}", file=sys.stderr, flush=True)
    try:
        warning = slurm.requeue(slurm.job_name(os.environ), exclude)
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
    for host in slurm.down_hosts(before["hosts"]):
        lost = SlurmftError(f"node {host} was lost (Slurm calls it down)")
        run.add_failure(f"node {host}", lost, bad_host=host, attempt=before["number"])


def end_on_slurm(run: RunDir, code: int) -> int:
    """Requeues this script's own job, or returns its exit code."""
    state = slurm.job_state(slurm.job_name(os.environ))
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


def await_failure(run: RunDir, code: int) -> None:
    """Gives a shared file system a moment to show what other nodes wrote."""
    deadline = time.monotonic() + _FILE_LAG_S
    while code not in (Exit.OK, Exit.STOPPED) and run.root_failure() is None:
        if time.monotonic() > deadline:
            return
        with contextlib.suppress(OSError):  # a change of its own makes NFS read the folder anew
            probe = run.failures / f".{os.getpid()}"
            probe.touch()
            probe.unlink()
        time.sleep(0.5)


def main(argv: list[str]) -> int:
    run = RunDir.open(argv[1])
    run.settle_permissions()
    if argv[0] == "begin":
        return begin_on_slurm(run)
    if argv[0] == "avoid":
        return avoid_on_slurm(run)
    return end_on_slurm(run, int(argv[2]))


if __name__ == "__main__":
    stamps.stamp_output("stderr")  # the batch script reads stdout
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
