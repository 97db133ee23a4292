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
from slurmft.core.run_files import Failure, current_attempt
from slurmft.node import ccl, hardware, heartbeat, profiles, signals
from slurmft.node.hardware import host_name
from slurmft.node.profiles import Profile
from slurmft.node.rendezvous import LISTEN, LOCAL_NODE, Rendezvous
from slurmft.node.supervisor import Child, Supervisor, await_cause, run_task
from slurmft.node.watchdog import Watchdog
from slurmft.programs import node_environment
from slurmft.programs.description import OwnProgram
from slurmft.runs import log_times
from slurmft.runs.rundir import RUN_DIR

_START_TIMEOUT_S = 600
"""How long torchrun waits for the other nodes' torchrun: importing torch from a cold shared file
system takes minutes. That the head can be reached is known before (`Rendezvous.check`)."""

_STOP_TIMEOUT_S = 5
"""Between torchrun's SIGTERM and SIGKILL to the ranks of a failed node."""


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


def use_of_node(config: RunConfig, environment: Mapping[str, str]) -> Profile:
    """How a run uses this node; UsageError where it does not have what was asked for."""
    here = hardware.detect(environment)
    uses_gpus = profiles.name_of(here, config.job) == "gpu"
    binding = ccl.choose(config.job.backend, uses_gpus)
    part = None
    if LOCAL_NODE in environment:
        part = (int(environment[LOCAL_NODE]), config.job.nodes)
    return profiles.choose(here, config.job, uses_ccl=binding is not None, part=part)


def run_torchrun(
    supervisor: Supervisor,
    config: RunConfig,
    rendezvous: Rendezvous,
    nodes: str | None = None,
    ends_with_others: bool = True,
) -> int:
    """Runs torchrun as the child of this task; returns the task's exit code. `nodes` is for
    `node_command`."""
    profile = use_of_node(config, os.environ)
    child = Child(
        command=node_command(config, supervisor.run.path, rendezvous, str(profile.nproc), nodes),
        record_failure=partial(record_torchrun_failure, supervisor),
        tasks=len(rendezvous.hosts),
        records_stop=rendezvous.is_head,
        ends_with_others=ends_with_others,
    )
    return run_child(supervisor, child, config, rendezvous, profile)


def node_command(
    config: RunConfig, run_dir: Path, rendezvous: Rendezvous, nproc: str, nodes: str | None = None
) -> list[str]:
    """What a node runs: torchrun, or the processes of a program that does without. `nodes` is their
    number where it may change, as in 2:4.

    Every rank runs the program's module, with the run directory as its only argument.
    """
    module, own = config.program.module, OwnProgram.of(config.program)
    if own and own.per != "torchrun":
        count = "1" if own.per == "node" else nproc
        return [
            sys.executable, "-m", "slurmft.node.processes", module, str(run_dir), own.per, count,
            str(rendezvous.node_rank), str(len(rendezvous.hosts)),
            rendezvous.head, str(rendezvous.port),
        ]  # fmt: skip
    # Else torch finds the store's host by matching host names, which fails where the fabric's name
    # differs from the host's own.
    conf = {
        "is_host": str(rendezvous.is_head).lower(),
        "join_timeout": _START_TIMEOUT_S,
        "read_timeout": _START_TIMEOUT_S,
    }
    return [
        sys.executable, "-m", "slurmft.node.torchrun",
        "--nnodes", nodes or str(len(rendezvous.hosts)),
        "--nproc-per-node", nproc,
        "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{rendezvous.head}:{rendezvous.port}",
        "--rdzv-id", rendezvous.id,
        "--rdzv-conf", ",".join(f"{k}={v}" for k, v in conf.items()),
        "--local-addr", rendezvous.host,
        "--max-restarts", str(config.job.max_restarts),
        "--log-dir", os.devnull,  # the ranks have logs of their own
        "--module", module, str(run_dir),
    ]  # fmt: skip


def run_child(
    supervisor: Supervisor,
    child: Child,
    config: RunConfig,
    rendezvous: Rendezvous,
    profile: Profile,
) -> int:
    """Runs the child in the environment of this node's ranks; returns the task's exit code."""
    own = OwnProgram.of(config.program)
    environment = training_environment(profile, rendezvous, os.environ)
    if config.program.needs_hub and "HF_HUB_OFFLINE" not in environment and not hub_in_reach():
        environment["HF_HUB_OFFLINE"] = "1"
    with (
        hooks.node_python(lambda: bool(supervisor.stop_signal)) as provided,
        contextlib.closing(Watchdog(config.job.hang_timeout_s, own is None)) as watchdog,
    ):
        environment |= provided.variables
        if own and own.accelerate_config:
            environment |= node_environment.accelerate_variables(own, environment)
        environment |= locks.environment(config.job.file_locks, environment)
        environment[heartbeat.FOLDER] = str(watchdog.folder)
        environment[RUN_DIR] = str(supervisor.run.path)
        write_json(heartbeat.hardware_file(watchdog.folder), profile.hardware.facts())
        if supervisor.stop_signal:
            environment[signals.STOPPING] = str(supervisor.stop_signal)
        child = replace(child, command=[provided.python, *child.command[1:]])
        return supervisor.supervise(child, environment, rendezvous.node_rank, watchdog)


def training_environment(
    profile: Profile, rendezvous: Rendezvous, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of torchrun and its processes.

    Variables that the user has set take precedence over what is found here, but not over flags.
    """
    found = profiles.merge(profile.settings(), environment)
    found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_STOP_TIMEOUT_S)
    # torchrun's agents keep one store for all restarts, and its old keys: restarted ranks may read
    # the addresses of those that died. Without sharing, every restart has a store of its own.
    found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    address = rendezvous.listen_address()
    found[LISTEN] = f"{rendezvous.host}={address}" if address else ""
    sockets = dict[str, str]()
    if interface := rendezvous.socket_interface():  # NCCL takes a bare name for a prefix
        sockets = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    if interface and profile.uses_ccl:  # whose libfabric may take loopback, and wait for ever
        sockets |= {"FI_TCP_IFACE": interface, "CCL_KVS_IFACE": interface}
    binding = ccl.find() if profile.uses_ccl else None
    asked = sockets if rendezvous.interface is not None else {}  # --interface
    own = binding.environment() if binding else {}
    return found | sockets | dict(environment) | asked | own


def record_torchrun_failure(supervisor: Supervisor, code: int, log: Path, start: int) -> int:
    """Records why torchrun failed on this node; returns the exit code of the task."""
    run, host, hint = supervisor.run, host_name(), f"log: {log}"
    where, failure = f"node {host}", None
    if code < 0:
        killed = SlurmftError(f"torchrun was killed by {signal.Signals(-code).name}", hint)
        late = bool(supervisor.stop_signal)  # Slurm kills what does not end in time: nobody's fault
        failure = run.add(
            Failure.of(where, killed, secondary=late, bad_host=None if late else host)
        )
    elif number := killed_by(log, start):
        oom = " (out of memory?)" if number == signal.SIGKILL else ""
        killed = SlurmftError(f"a rank was killed by {signal.Signals(number).name}{oom}", hint)
        # A rank that loses its peers may abort; a rank killed otherwise is the cause. Its host is
        # not blamed: memory runs out on any.
        aborted = number == signal.SIGABRT
        failure = run.add(Failure.of(where, killed, secondary=aborted, retry=True))
    # Its ranks have ended, and said why.
    failure = run.root_failure(current_attempt(), f"*-{host}-*") or failure
    if failure is None or failure.secondary:
        elsewhere = await_cause(supervisor.peers)
        if failure is None and not elsewhere:
            unknown = SlurmftError(f"torchrun ended with exit code {code}", hint)
            failure = run.add(Failure.of(where, unknown, retry=bool(run.newest_checkpoint())))
    return int(failure.code if failure else Exit.FAILED)


def killed_by(torchrun_log: Path, start: int) -> int | None:
    """The signal that last killed a rank, by torchrun's log from byte `start` on; None: none."""
    try:
        with open(torchrun_log, "rb") as file:
            file.seek(start)
            text = file.read().decode("utf-8", errors="replace")
    except OSError:  # gone, as the whole run may be
        return None
    found = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank", text)
    return -int(found[-1]) if found and int(found[-1]) < 0 else None


if __name__ == "__main__":
    log_times.stamp_output("stdout", "stderr")
    run_task(sys.argv[1], run_node)
