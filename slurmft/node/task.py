"""The task of a node: rendezvous, environment, torchrun (`python -m slurmft.node.task RUN_DIR`)."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping
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
    granted_cpus,
    hardware,
    heartbeat,
    profiles,
    signals,
    start,
)
from slurmft.node.hardware import host_name
from slurmft.node.profiles import Profile
from slurmft.node.rendezvous import LISTEN, LOCAL_NODE, Rendezvous
from slurmft.node.supervisor import Child, Supervisor, await_cause, run_task
from slurmft.node.watchdog import Watchdog
from slurmft.runs import log_times
from slurmft.runs.records import warn
from slurmft.runs.rundir import RUN_DIR

# How long torchrun waits between SIGTERM and SIGKILL to the ranks of a failed node.
_STOP_TIMEOUT_S = 5


def run_node(supervisor: Supervisor) -> int:
    """Runs this node's share of the job; returns its exit code."""
    run = supervisor.run
    config = run.load_own_config()  # it names the module that the ranks run
    run.settle_permissions()
    rendezvous = Rendezvous.of_node(config.job, os.environ)
    if not meet(supervisor, config, rendezvous):
        return Exit.FAILED
    return run_torchrun(supervisor, config, rendezvous)


def meet(supervisor: Supervisor, config: RunConfig, rendezvous: Rendezvous) -> bool:
    """Connects this task with the others; returns whether all nodes pass their examinations."""
    timeout_s = config.job.rdzv_timeout_s
    examinations = hooks.examine_node(config, supervisor.run, rendezvous)
    supervisor.peers = peers = rendezvous.check(timeout_s)
    return all(passes(peers, timeout_s) for passes in examinations)


def use_of_node(
    config: RunConfig,
    environment: Mapping[str, str],
    for_rank: bool = False,
    is_bound: bool = False,
) -> Profile:
    """Decides how a run uses this node. `for_rank` and `is_bound`: see `profiles.choose`.

    Raises:
        UsageError: the node does not have what was asked for.
    """
    node_hardware = hardware.detect(environment)
    uses_gpus = profiles.name_of(node_hardware, config.job) == "gpu"
    python = kind_of(config.program).python
    binding = ccl.choose(config.job.backend, uses_gpus, python)
    part = None
    if LOCAL_NODE in environment:  # a simulated node: it has a part of this machine
        part = (int(environment[LOCAL_NODE]), config.job.nodes)
    uses_ccl = binding is not None
    return profiles.choose(
        node_hardware,
        config.job,
        uses_ccl=uses_ccl,
        part=part,
        for_rank=for_rank,
        is_bound=is_bound,
    )


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
    profile = use_of_node(config, os.environ)
    # Of one node, as nodes of a job are mostly alike.
    warning = granted_cpus.warning(profile, config.job, os.environ)
    if warning and rendezvous.is_head:
        warn(supervisor.run.records, warning)
    child = Child(
        command=start.node_command(
            config, supervisor.run.path, rendezvous, str(profile.nproc), nodes
        ),
        record_failure=partial(record_torchrun_failure, supervisor),
        tasks=len(rendezvous.hosts),
        records_stop=rendezvous.is_head,
        ends_with_others=ends_with_others,
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
        environment |= kind.node_variables(environment)
        environment |= locks.environment(config.job.file_locks, environment)
        environment[heartbeat.FOLDER] = str(watchdog.folder)
        environment[RUN_DIR] = str(supervisor.run.path)
        if profile.uses_ccl:
            (watchdog.folder / ccl.MARK).touch()
        write_json(heartbeat.hardware_file(watchdog.folder), profile.hardware.facts())
        if supervisor.stop_signal:
            environment[signals.STOPPING] = str(supervisor.stop_signal)
        child = replace(child, command=[provided.python, *child.command[1:]])
        return supervisor.supervise(child, environment, rendezvous.node_rank, watchdog)


def training_environment(
    profile: Profile,
    rendezvous: Rendezvous,
    environment: Mapping[str, str],
    python: str = sys.executable,
) -> dict[str, str]:
    """Returns the environment of torchrun and its processes.

    Variables that the user has set take precedence over what is found here, but not over flags.

    Args:
        python: that of the program, whose packages count.
    """
    variables = profiles.merge(profile.settings(), environment)
    variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_STOP_TIMEOUT_S)
    # torchrun's agents keep one store for all restarts, and its old keys: restarted ranks may read
    # the addresses of those that died. Without sharing, every restart has a store of its own.
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    address = rendezvous.listen_address()
    variables[LISTEN] = ""
    if address:
        variables[LISTEN] = f"{rendezvous.host}={address}"
    interface_variables = _interface_variables(
        rendezvous.socket_interface(), profile.uses_ccl
    )
    variables |= interface_variables
    if profile.uses_ccl and rendezvous.has_several_nodes:
        variables |= ccl.NETWORK_VARIABLES
    variables |= environment
    if rendezvous.interface is not None:  # the flag --interface
        variables |= interface_variables
    if profile.uses_ccl and (binding := ccl.find(python)):
        variables |= binding.environment()
    return variables


def _interface_variables(interface: str | None, uses_ccl: bool) -> dict[str, str]:
    """Returns the variables that bind collectives to a network interface."""
    if interface is None:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": interface}
    variables["NCCL_SOCKET_IFNAME"] = f"={interface}"  # a bare name would be a prefix
    if uses_ccl:
        variables |= ccl.interface_variables(interface)
    return variables


def record_torchrun_failure(
    supervisor: Supervisor, code: int, log: Path, start: int
) -> int:
    """Records why torchrun failed on this node; returns the exit code of the task."""
    run = supervisor.run
    host = host_name()
    where = f"node {host}"
    hint = f"log: {log}"
    failure = None
    if code < 0:
        name = signal.Signals(-code).name
        error = SlurmftError(f"torchrun was killed by {name}", hint)
        if supervisor.stop_signal:
            # Slurm kills what does not end in time: that is no host's fault.
            failure = run.add(Failure.of(where, error, secondary=True))
        else:
            failure = run.add(Failure.of(where, error, bad_host=host))
    elif number := killed_by(log, start):
        error = SlurmftError(_killed_rank(number), hint)
        # A rank that loses its peers may abort. A rank killed otherwise is the cause; its host is
        # not blamed: memory runs out on any.
        is_secondary = number == signal.SIGABRT
        failure = run.add(Failure.of(where, error, secondary=is_secondary, retry=True))
    # The ranks have ended, and recorded why.
    failure = run.root_failure(current_attempt(), f"*-{host}-*") or failure
    if failure is None or failure.secondary:
        failed_elsewhere = await_cause(supervisor.peers)
        if failure is None and not failed_elsewhere:
            error = SlurmftError(f"torchrun ended with exit code {code}", hint)
            # With a checkpoint, its tasks have worked: another start may do.
            has_checkpoint = bool(run.newest_checkpoint())
            failure = run.add(Failure.of(where, error, retry=has_checkpoint))
    if failure is None:
        return Exit.FAILED
    return int(failure.code)


def _killed_rank(signal_number: int) -> str:
    text = f"a rank was killed by {signal.Signals(signal_number).name}"
    if signal_number == signal.SIGKILL:
        text += " (out of memory?)"
    return text


def killed_by(torchrun_log: Path, start: int) -> int | None:
    """Returns the signal that last killed a rank, by torchrun's log from byte `start` on, or
    None."""
    try:
        with open(torchrun_log, "rb") as file:
            file.seek(start)
            text = file.read().decode("utf-8", errors="replace")
    except OSError:  # gone, as the whole run may be
        return None
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
