"""What the one task of each node does: rendezvous, environment, torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft import locks
from slurmft.core import process
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.credentials import redact
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.files import write_json
from slurmft.core.hub import hub_in_reach
from slurmft.node import ccl, hardware, heartbeat, profiles, rendezvous, signals, staged_env
from slurmft.node.profiles import Profile
from slurmft.node.rendezvous import Rendezvous
from slurmft.node.watchdog import Watchdog, hang_marker
from slurmft.runs import log_times
from slurmft.runs.rundir import ATTEMPT, RunDir, current_attempt, log_head

LOCAL_NODE = "SLURMFT_LOCAL_NODE"
"""Set for a simulated node: its index among `--nodes`, on the loopback network."""

_START_TIMEOUT_S = 600
"""How long torchrun waits for the other nodes' torchrun: importing torch from a cold shared file
system takes minutes. That they can be reached is known before (`Rendezvous.check`)."""

_CAUSE_WAIT_S = 5

_STOP_TIMEOUT_S = 5
"""Between torchrun's SIGTERM and SIGKILL to the ranks of a failed node."""

_POLL_S = 0.5
_LOOK_EVERY_S = 2.0


class NodeTask:
    """The task of one node of a run; submitit pickles it and calls it on every node."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.signal = 0
        """The first stop signal that came; 0: none."""
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._pass_fds: tuple[int, ...] = ()

    def __call__(self) -> None:
        """Becomes `python -m slurmft.node.task`: submitit's handlers, and threads that libraries
        have started with no signal blocked, end with its program; the mask stays."""
        signals.block()
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-u", "-m", "slurmft.node.task", self.run_dir])

    def main(self) -> None:
        """Runs this node's share of the job; ends this process with the job's exit code."""
        signals.block()
        signals.listen(self._on_signal)
        run = RunDir(Path(self.run_dir))
        try:
            code = self._run(run)
        except Exception as error:
            code = record(run, error)
        # Not by SystemExit: Python's shutdown takes time in which a signal would make this task's
        # exit code, and so the job's, that of a signal.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _on_signal(self, signum: int, sender: int) -> None:
        """Hands a stop on to torchrun: not every sender sends it to all processes."""
        self.signal = self.signal or signum
        if self._torchrun is not None:
            self._torchrun.send_signal(signals.RELAYED)

    def _run(self, run: RunDir) -> int:
        config = run.load_config()
        run.settle_permissions()
        meeting = self._meet(run, config)
        profile, binding = self._use_of_node(config)
        self._check_meeting(meeting, config.job.rdzv_timeout_s)
        with staged_env.environment(os.environ, lambda: bool(self.signal)) as (python, variables):
            return self._train(run, config, meeting, profile, binding, python, variables)

    def _train(
        self,
        run: RunDir,
        config: RunConfig,
        meeting: Rendezvous,
        profile: Profile,
        binding: ccl.Binding | None,
        python: str,
        variables: dict[str, str],
    ) -> int:
        """Runs this node's ranks, with a Python and the variables that belong to it."""
        environment = training_environment(profile, meeting, os.environ)
        if binding is not None:
            environment |= binding.environment()
        if config.program.needs_hub and "HF_HUB_OFFLINE" not in environment and not hub_in_reach():
            environment["HF_HUB_OFFLINE"] = "1"
        environment |= variables
        environment |= locks.environment(config.job.file_locks, environment)
        watchdog = Watchdog(config.job.hang_timeout_s)
        environment[heartbeat.FOLDER] = str(watchdog.folder)
        write_json(heartbeat.hardware_file(watchdog.folder), profile.hardware.facts())
        if self.signal:
            environment[signals.STOPPING] = str(self.signal)
        command = self._command(run, config, meeting, profile.nproc)
        if variables:
            command[0] = python
        try:
            return self._supervise(run, command, environment, meeting, watchdog)
        finally:
            watchdog.close()

    # What is another under mpirun (slurmft.node.mpi).

    def _meet(self, run: RunDir, config: RunConfig) -> Rendezvous:
        return meeting_point(config.job, os.environ)

    def _use_of_node(self, config: RunConfig) -> tuple[Profile, ccl.Binding | None]:
        return use_of_node(config, os.environ)

    def _check_meeting(self, meeting: Rendezvous, timeout_s: float) -> None:
        meeting.check(timeout_s)

    def _command(
        self, run: RunDir, config: RunConfig, meeting: Rendezvous, nproc: int
    ) -> list[str]:
        module, restarts = config.program.module, config.job.max_restarts
        return torchrun_command(module, run.path, meeting, str(nproc), restarts)

    def _supervise(
        self,
        run: RunDir,
        command: list[str],
        environment: Mapping[str, str],
        meeting: Rendezvous,
        watchdog: Watchdog,
    ) -> int:
        """Runs torchrun to its end, or ends it; returns the exit code of this task."""
        log_path = run.logs / f"node-{meeting.node_rank:03d}.log"
        with open(log_path, "ab") as log:
            start, look_at = log.tell(), 0.0
            head = log_head(f"node {meeting.node_rank}", host_name())
            log_times.StampedLog(log.fileno()).write(f"{head}\n".encode())
            self._torchrun = process.start(
                command, env=environment, stdout=log, stderr=log, pass_fds=self._pass_fds
            )
            while (code := poll(self._torchrun)) is None:
                if time.monotonic() >= look_at:  # not every node at the shared files all the time
                    look_at = time.monotonic() + _LOOK_EVERY_S
                    if run.is_superseded(current_attempt()):
                        return self._abandon(run)
                    if hang_marker(run).exists():
                        watchdog.dump(run)
                if self.signal:  # again, in case torchrun was not there yet
                    self._torchrun.send_signal(signals.RELAYED)
                if meeting.is_head and self.signal:
                    self._say_stopping(run)
                if self.signal and self._is_over_elsewhere(run):
                    break
                if watchdog.check() and self._end_hang(run, watchdog):
                    return int(Exit.FAILED)
        if code is None:
            process.end(self._torchrun)
            return int(Exit.FAILED)
        if code == 0:
            return int(Exit.STOPPED if (watchdog.folder / "stopped").exists() else Exit.OK)
        return self._conclude(run, code, log_path, start)

    def _say_stopping(self, run: RunDir) -> None:
        if run.get_state()["state"] == "running":
            with contextlib.suppress(OSError):  # a full disk must not keep the ranks from saving
                run.set_state("stopping", f"the job received {signal.Signals(self.signal).name}")

    def _is_over_elsewhere(self, run: RunDir) -> bool:
        """Whether the stop signal is srun's, because the task of another node has failed."""
        return any(
            f["where"].startswith("node ") and f["attempt"] == current_attempt()
            for f in run.all_failures()
        )

    def _abandon(self, run: RunDir) -> int:
        """Ends this node's part of an attempt that Slurm has given up, and started anew."""
        assert self._torchrun is not None
        process.end(self._torchrun)
        print(f"a later attempt of {run.path} has begun: this one ends", file=sys.stderr)
        return int(Exit.FAILED)

    def _end_hang(self, run: RunDir, watchdog: Watchdog) -> bool:
        """Shows where the ranks of this node are, and kills them; not if they moved meanwhile."""
        assert self._torchrun is not None
        watchdog.dump(run)
        hang = watchdog.check()
        if hang is None:
            return False
        host = host_name()
        error = SlurmftError(
            f"rank {hang.rank} hangs: {hang.words}",
            f"where its threads are: {run.stacks(hang.rank)}",
        )
        with contextlib.suppress(OSError):
            # Ranks that wait for the one that hangs look alike: only a stopped process is certain.
            run.add_failure(f"node {host}", error, secondary=not hang.certain, bad_host=host)
        print(f"error: {error}", file=sys.stderr, flush=True)
        if not hang.certain:
            await_cause(run)
        process.end(self._torchrun)
        return True

    def _conclude(self, run: RunDir, code: int, log: Path, start: int) -> int:
        """Records why torchrun failed on this node; returns the exit code of this task."""
        host = host_name()
        where = f"node {host}"
        if code < 0:
            killed = SlurmftError(f"torchrun was killed by {name(-code)}", f"log: {log}")
            run.add_failure(where, killed, bad_host=host)
        elif signal_number := killed_by(log, start):
            oom = " (out of memory?)" if signal_number == signal.SIGKILL else ""
            killed = SlurmftError(f"a rank was killed by {name(signal_number)}{oom}", f"log: {log}")
            # A rank that loses its peers may abort; who was killed otherwise is the cause.
            # Its host is not blamed: memory runs out on any.
            run.add_failure(where, killed, secondary=signal_number == signal.SIGABRT, retry=True)
        failure = await_cause(run)
        if failure is None:
            unknown = SlurmftError(f"torchrun ended with exit code {code}", f"log: {log}")
            failure = run.add_failure(where, unknown, retry=bool(run.checkpoint_names()))
        # Told by a file, too: other nodes see it before srun tells them.
        ended = SlurmftError("its ranks ended", code=failure["code"])
        run.add_failure(where, ended, secondary=True, retry=failure["retry"])
        return int(failure["code"])


def poll(torchrun: subprocess.Popen[bytes]) -> int | None:
    """Waits a moment for torchrun's exit code; None: it runs."""
    try:
        return torchrun.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return None


def await_cause(run: RunDir) -> dict[str, Any] | None:
    """The failure that ended the run, or a secondary one; None: none is recorded.

    Where the ranks here only lost their peers, or wait for them, the node where the failure began
    gets a moment to record it: the end of this task makes srun end that node's task, too.
    """
    deadline = time.monotonic() + _CAUSE_WAIT_S
    while (failure := run.root_failure()) is None or failure["secondary"]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return failure


def host_name() -> str:
    """This host, as Slurm names it; where there is no Slurm, as it names itself."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def name(signal_number: int) -> str:
    return signal.Signals(signal_number).name


def record(run: RunDir, error: Exception) -> int:
    """Records a failure of this node itself; returns the exit code."""
    trace = None if isinstance(error, SlurmftError) else traceback.format_exc()
    shown = error
    if not isinstance(shown, SlurmftError):
        shown = SlurmftError(f"{type(error).__name__}: {error}")
    print(redact(trace or f"error: {shown}"), file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # a full disk takes no record of itself
        run.add_failure(f"node {host_name()}", shown, trace)
    return int(shown.code)


def killed_by(torchrun_log: Path, start: int) -> int | None:
    """The signal that last ended a rank, by torchrun's words from byte `start` of its log; None: no
    rank was killed."""
    with open(torchrun_log, "rb") as file:
        file.seek(start)
        text = file.read().decode("utf-8", errors="replace")
    found = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank", text)
    return -int(found[-1]) if found and int(found[-1]) < 0 else None


def meeting_point(job: JobConfig, environment: Mapping[str, str]) -> Rendezvous:
    """The rendezvous of this node: Slurm's, or that of a simulated node.

    Raises:
        RendezvousError: neither; or Slurm gave another number of nodes than the run was set up for.
    """
    if LOCAL_NODE in environment:
        port, roll_call_port = rendezvous.ports_from(environment)
        return Rendezvous(
            hosts=tuple(rendezvous.simulated_host(i) for i in range(job.nodes)),
            node_rank=int(environment[LOCAL_NODE]),
            port=port,
            roll_call_port=roll_call_port,
            id=f"local-{port}.{environment.get(ATTEMPT, '0')}",
            interface=job.interface or "lo",
        )
    meeting = rendezvous.from_slurm(
        environment, host_suffix=job.host_suffix, interface=job.interface
    )
    if len(meeting.hosts) != job.nodes:
        raise rendezvous.RendezvousError(
            f"the run is set up for {job.nodes} nodes, Slurm gave {len(meeting.hosts)}"
        )
    return meeting


def use_of_node(
    config: RunConfig, environment: Mapping[str, str]
) -> tuple[Profile, ccl.Binding | None]:
    """How a run uses this node, and oneCCL's binding if that does the collectives.

    Raises:
        UsageError: the node cannot serve what was asked for.
    """
    here = hardware.detect(environment)
    profiles.check_precision(here, config.program.precision)
    binding = ccl.choose(config.job.backend, bool(here.gpus))
    part = None
    if LOCAL_NODE in environment:
        part = (int(environment[LOCAL_NODE]), config.job.nodes)
    return profiles.choose(here, config.job, uses_ccl=binding is not None, part=part), binding


def training_environment(
    profile: Profile, meeting: Rendezvous, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of torchrun and its processes.

    What the user has set in the environment wins over what is found here, but not over flags.
    """
    found = profiles.merge(profile.settings(), environment)
    found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_STOP_TIMEOUT_S)
    # torchrun's agents keep one store for all restarts, and its old keys: restarted ranks may read
    # the addresses of those that died. Without sharing, every restart has a store of its own.
    found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    address = meeting.listen_address()
    found[rendezvous.LISTEN] = f"{meeting.host}={address}" if address else ""
    interface = meeting.socket_interface()
    if interface is None:
        return found | dict(environment)
    # NCCL takes a bare name for a prefix.
    sockets = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    if meeting.interface is not None:  # from --interface
        return found | dict(environment) | sockets
    return found | sockets | dict(environment)


def torchrun_command(
    module: str,
    run_dir: Path,
    meeting: Rendezvous,
    nproc: str,
    max_restarts: int,
    nodes: str | None = None,
) -> list[str]:
    """The torchrun command of a node; `nodes` where their number may change, as in 2:4.

    Every rank runs `module`, with the run directory and nothing else as its argument.
    """
    # torch matches host names to find the host of the store, which fails where the fabric's name
    # differs from the host's own: say it.
    conf = {
        "is_host": str(meeting.is_head).lower(),
        "join_timeout": _START_TIMEOUT_S,
        "read_timeout": _START_TIMEOUT_S,
    }
    return [
        sys.executable, "-m", "slurmft.node.torchrun",
        "--nnodes", nodes or str(len(meeting.hosts)),
        "--nproc-per-node", nproc,
        "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{meeting.head}:{meeting.port}",
        "--rdzv-id", meeting.id,
        "--rdzv-conf", ",".join(f"{k}={v}" for k, v in conf.items()),
        "--local-addr", meeting.host,
        "--max-restarts", str(max_restarts),
        "--log-dir", str(run_dir / "logs" / "torchrun"),
        "--module", module, str(run_dir),
    ]  # fmt: skip


def main(argv: list[str]) -> None:
    """`python -m slurmft.node.task RUN_DIR`: the task of one node."""
    log_times.stamp_output("stdout", "stderr")
    NodeTask(argv[0]).main()


if __name__ == "__main__":
    main(sys.argv[1:])
