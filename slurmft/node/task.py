"""The task of a node: rendezvous, environment, torchrun (`python -m slurmft.node.task RUN_DIR`)."""

import contextlib
import os
import re
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from slurmft import locks
from slurmft.core import hooks
from slurmft.core.config import RunConfig
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.files import write_json
from slurmft.core.hub import hub_in_reach
from slurmft.core.program import kind_of
from slurmft.core.run_files import Failure, current_attempt
from slurmft.node import (
    ccl,
    collectives,
    compile_cache,
    granted_cpus,
    heartbeat,
    memory_kills,
    profiles,
    sealed,
    signals,
    start,
)
from slurmft.node.hardware import host_name
from slurmft.node.preparation import training_environment, use_of_node
from slurmft.node.profiles import Profile
from slurmft.node.rendezvous import (
    LOST_STORE,
    NO_PORT,
    Rendezvous,
    reserved_descriptors,
)
from slurmft.node.supervisor import Child, Supervisor, await_cause, run_task
from slurmft.node.watchdog import Watchdog
from slurmft.runs import frozen_code, log_times
from slurmft.runs.records import warn
from slurmft.runs.rundir import RUN_DIR


def run_node(supervisor: Supervisor) -> int:
    """Runs this node's share of the job; returns its exit code."""
    run = supervisor.run
    config = run.join()  # it names the module that the ranks run
    frozen_code.check(run, config)
    run.settle_permissions()
    rendezvous = Rendezvous.of_node(config.job, os.environ)
    config = replace(config, job=config.job.on_nodes(len(rendezvous.hosts)))
    reserve_port(config, rendezvous)
    if not meet(supervisor, config, rendezvous):
        return Exit.FAILED
    return run_torchrun(supervisor, config, rendezvous)


def reserve_port(config: RunConfig, rendezvous: Rendezvous) -> None:
    """Opens the port of torchrun's store, which this process then hands down; on the head."""
    # Programs that do without torchrun open their ports themselves.
    if rendezvous.is_head and kind_of(config.program).per == "torchrun":
        os.environ.update(rendezvous.reserve_port(os.environ))


def meet(supervisor: Supervisor, config: RunConfig, rendezvous: Rendezvous) -> bool:
    """Connects this task with the others; returns whether all nodes pass their examinations."""
    timeout_s = config.job.rdzv_timeout_s
    # Before the nodes meet: a node is examined while it waits for the others.
    examinations = hooks.examine_node(config, supervisor.run, rendezvous)
    supervisor.peers = peers = rendezvous.check(timeout_s)
    return all(passes(peers, timeout_s) for passes in examinations)


def run_torchrun(
    supervisor: Supervisor,
    config: RunConfig,
    rendezvous: Rendezvous,
    nodes: str | None = None,
    ends_with_others: bool = True,
) -> int:
    """Runs torchrun as the child of this task; returns the task's exit code.

    Args:
        nodes: the number of nodes where it may change, as "2:4".
        ends_with_others: the failure of another node ends this one, too.
    """
    config = collectives.settle(supervisor, config, rendezvous)
    profile = use_of_node(config, os.environ)
    # Of one node, as nodes of a job are mostly alike.
    warning = granted_cpus.warning(profile, config.job, os.environ)
    if warning and rendezvous.is_head:
        warn(supervisor.run.records, warning)
    least_nodes = len(rendezvous.hosts)
    if nodes is not None:
        least_nodes = int(nodes.partition(":")[0])
    starter = "torchrun"
    if kind_of(config.program).per != "torchrun":
        starter = "the process that starts the program"
    child = Child(
        command=start.node_command(
            config, supervisor.run.path, rendezvous, str(profile.nproc), nodes
        ),
        record_failure=partial(record_torchrun_failure, supervisor, starter=starter),
        tasks=len(rendezvous.hosts),
        others=least_nodes - 1,
        rdzv_timeout_s=config.job.rdzv_timeout_s,
        records_stop=rendezvous.is_head,
        ends_with_others=ends_with_others,
        pass_fds=reserved_descriptors(os.environ),
    )
    return run_child(supervisor, child, config, rendezvous, profile)


def run_child(
    supervisor: Supervisor,
    child: Child,
    config: RunConfig,
    rendezvous: Rendezvous,
    profile: Profile,
) -> int:
    """Runs the child in the environment of this node's ranks; returns the task's exit code."""
    kind = kind_of(config.program)
    environment = training_environment(profile, rendezvous, os.environ, kind.python)
    is_chosen = "HF_HUB_OFFLINE" in environment
    # Many compute nodes have no way out: libraries would retry for each file of a model.
    if config.program.needs_hub and not is_chosen and not hub_in_reach():
        environment["HF_HUB_OFFLINE"] = "1"
    with (
        hooks.node_python(lambda: bool(supervisor.stop_signal)) as provided,
        contextlib.closing(
            Watchdog(config.job.hang_timeout_s, kind.attaches)
        ) as watchdog,
    ):
        environment |= provided.variables
        environment |= compile_cache.variables(environment)
        environment |= kind.node_variables(environment)
        environment |= locks.environment(config.job.file_locks, environment)
        environment[heartbeat.FOLDER] = str(watchdog.folder)
        environment[RUN_DIR] = str(supervisor.run.path)
        # As the nodes have settled it (`collectives.settle`). The ranks read the configuration,
        # which still has what the user gave.
        environment[profiles.BACKEND] = config.job.backend
        if profile.uses_ccl:
            (watchdog.folder / ccl.MARK).touch()
        write_json(heartbeat.hardware_file(watchdog.folder), profile.hardware.facts())
        memory_kills.note(heartbeat.memory_kills_file(watchdog.folder))
        # A stop that came before there were ranks: they read it when they start.
        if supervisor.stop_signal:
            environment[signals.STOPPING] = str(supervisor.stop_signal)
        child = replace(child, command=[provided.python, *child.command[1:]])
        return supervisor.supervise(child, environment, rendezvous.node_rank, watchdog)


def record_torchrun_failure(
    supervisor: Supervisor,
    code: int,
    log: Path,
    start: int,
    starter: str = "torchrun",
) -> int:
    """Records why torchrun failed on this node; returns the exit code of the task.

    Args:
        code: the exit code of torchrun.
        log: what it has printed.
        start: where that begins in the log, in bytes.
        starter: what starts the ranks, where it is not torchrun, in words.
    """
    run = supervisor.run
    host = host_name()
    where = f"node {host}"
    hint = f"log: {log}"
    failure = None
    if code < 0:
        error = memory_kills.killed(starter, -code, supervisor.memory_kills, hint)
        if supervisor.stop_signal:
            # Slurm kills what does not end in time: that is no host's fault.
            failure = run.add(Failure.of(where, error, secondary=True))
        elif error.out_of_memory:
            # That is no host's fault, either: memory runs out on any.
            failure = run.add(Failure.of(where, error, retry=True))
        else:
            failure = run.add(Failure.of(where, error, bad_host=host))
    elif number := killed_by(log, start):
        error = memory_kills.killed("a rank", number, supervisor.memory_kills, hint)
        # A rank that loses its peers may abort. A rank killed otherwise is the cause; its host is
        # not blamed: memory runs out on any.
        is_secondary = number == signal.SIGABRT
        failure = run.add(Failure.of(where, error, secondary=is_secondary, retry=True))
    elif starter == "torchrun" and (problem := _problem_of_meeting(code, log)):
        # The store is lost with the node that serves it: why, others know, or Slurm.
        is_effect = code == LOST_STORE
        failure = run.add(Failure.of(where, problem, secondary=is_effect, retry=True))
    # The ranks have ended, and recorded why.
    failure = run.root_failure(current_attempt(), f"*-{host}-*") or failure
    if failure is None or failure.secondary:
        failed_elsewhere = await_cause(supervisor.peers)
        if failure is None and not failed_elsewhere:
            error = SlurmftError(f"{starter} ended with exit code {code}", hint)
            # With a checkpoint, its tasks have worked: another start may do.
            has_checkpoint = bool(run.newest_checkpoint())
            failure = run.add(Failure.of(where, error, retry=has_checkpoint))
    if failure is None:
        return Exit.FAILED
    return int(failure.code)


def _problem_of_meeting(code: int, log: Path) -> SlurmftError | None:
    """Returns why the agents of torchrun could not meet, by its exit code; None: it is no such
    code."""
    problems = {
        int(Exit.RENDEZVOUS): (
            "somebody else has written into the store of torchrun",
            sealed.HINT,
        ),
        NO_PORT: (
            "torchrun could open no port",
            "others may hold all ports, or very many connections to this job; the next start "
            "takes other ports",
        ),
        LOST_STORE: (
            "torchrun has lost its store",
            "the node that serves it, or its torchrun, may have died",
        ),
    }
    if code not in problems:
        return None
    problem, hint = problems[code]
    return SlurmftError(problem, f"{hint}; log: {log}", Exit.RENDEZVOUS)


def killed_by(torchrun_log: Path, start: int) -> int | None:
    """Returns the signal that last killed a rank, by torchrun's log from byte `start` on, or
    None."""
    try:
        with open(torchrun_log, "rb") as file:
            file.seek(start)
            text = file.read().decode("utf-8", errors="replace")
    except OSError:  # gone, as the whole run may be
        return None
    # torchrun itself ends with 1: which signal has killed a rank, its log alone says.
    exit_codes = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank", text)
    if not exit_codes:
        return None
    # The last: torchrun may have started the ranks again after the ones before.
    code = int(exit_codes[-1])
    if code >= 0:
        return None
    return -code


if __name__ == "__main__":
    log_times.stamp_output("stdout", "stderr")
    run_task(sys.argv[1], run_node)
