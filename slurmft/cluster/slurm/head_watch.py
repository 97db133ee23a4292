"""Watches the first node of a job from another one (`python -m slurmft.cluster.slurm.head_watch`).

With --no-kill, Slurm keeps a job whose node dies. If that is the first one, it takes the batch
script with it: nobody would begin an attempt on the others, which would idle until the time limit.
"""

import os
import signal
import sys

from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.first_node import blame_lost_nodes, excludable_hosts, requeue
from slurmft.core import permissions
from slurmft.core.errors import Exit, SlurmftError, run_main
from slurmft.core.run_files import current_attempt
from slurmft.node import signals
from slurmft.runs import log_times
from slurmft.runs.attempts import SUPERSEDED, decide, end
from slurmft.runs.job_ids import own_job_id
from slurmft.runs.rundir import RunDir

_LOOK_EVERY_S = 60
_BY_SIGKILL = 128 + signal.SIGKILL


def watch(run: RunDir) -> int:
    """Waits until the attempt, or the job, is over; ends the attempt if the first node has died."""
    job_id = own_job_id(os.environ)
    attempt = run.read_attempt()
    # A full disk records no attempts.
    if attempt is None:
        return Exit.OK
    head = attempt.hosts[0]
    while not run.is_superseded(current_attempt()):
        # A signal to the job, which may be its end, is a reason to look at once.
        signal.sigtimedwait(signals.STOP, _LOOK_EVERY_S)
        try:
            nodes = commands.allocated_nodes(job_id)
            if not nodes:  # the job does not run any more
                return Exit.OK
            if head not in commands.hostnames(nodes):
                return end_without_head(run, head)
        except SlurmftError as error:  # the controller may answer next time
            print(f"slurmft: {error.message}", file=sys.stderr, flush=True)
    return Exit.OK


def end_without_head(run: RunDir, head: str) -> int:
    """Requeues a job whose first node Slurm has given up, or records its end; returns the exit
    code."""
    blame_lost_nodes(run, [head])
    outcome = decide(run, _BY_SIGKILL)
    if outcome.state == "requeued":
        return requeue(run, outcome.reason, excludable_hosts(run))
    end(run, outcome)()
    if outcome.state != SUPERSEDED:
        commands.cancel(own_job_id(os.environ))
    return outcome.code


def main(run_dir: str) -> int:
    # First of all: Slurm signals all steps of a job, and the watch goes on while the job does.
    signals.block()
    run = RunDir.open(run_dir)
    permissions.settle(run.join().job.share_with_group)
    return watch(run)


if __name__ == "__main__":
    log_times.stamp_output("stderr")
    raise SystemExit(run_main(lambda: main(sys.argv[1])))
