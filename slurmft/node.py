"""What the one task of each node does: rendezvous, environment, torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from slurmft import process, rendezvous
from slurmft.config import JobConfig
from slurmft.errors import Exit, SlurmftError
from slurmft.profiles import NodeProfile
from slurmft.rendezvous import Rendezvous
from slurmft.rundir import RunDir
from slurmft.sources import hub_in_reach, needs_hub

LOCAL_NODE = "SLURMFT_LOCAL_NODE"
"""Set for a simulated node: its index among `--nodes`, on the loopback network."""

_START_TIMEOUT_S = 600
"""How long torchrun waits for the other nodes' torchrun: importing torch from a cold shared file
system takes minutes. That they can be reached is known before (`Rendezvous.check`)."""

_ECHO_WAIT_S = 5

_STOP_TIMEOUT_S = 15
"""Between torchrun's SIGTERM and SIGKILL to the ranks of a failed node."""


class NodeTask:
    """The task of one node of a run; submitit pickles it and calls it on every node."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self._terminated = False

    def __call__(self) -> None:
        """Runs this node's share of the job; ends this process with the job's exit code."""
        run = RunDir(Path(self.run_dir))
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            code = self._run(run)
        except Exception as error:
            code = record(run, error)
        # Not by SystemExit: a SIGTERM that comes while Python shuts down, as srun sends it when
        # another task fails, would make this task's exit code, and so the job's, that of a signal.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """Whoever sends it (scancel, preemption) sends it to torchrun too: wait for that."""
        self._terminated = True

    def _run(self, run: RunDir) -> int:
        config = run.load_config()
        meeting = meeting_point(config.job, os.environ)
        if meeting.is_head:
            run.set_state("running", f"on {', '.join(meeting.hosts)}")
        simulated = LOCAL_NODE in os.environ
        profile = NodeProfile.detect(os.environ, share=config.job.nodes if simulated else 1)
        profile.check_precision(config.train.precision)
        nproc = profile.nproc_per_node(config.job.nproc_per_node)
        meeting.check(config.job.rdzv_timeout_s)
        environment = training_environment(profile, nproc, meeting, os.environ)
        if needs_hub(config.train) and "HF_HUB_OFFLINE" not in environment and not hub_in_reach():
            environment["HF_HUB_OFFLINE"] = "1"
        command = torchrun_command(run.path, meeting, str(nproc))
        with open(self._log(run, meeting), "ab") as log:
            torchrun = process.start(command, env=environment, stdout=log, stderr=log)
            if self._terminated:  # it came too early to reach torchrun
                torchrun.terminate()
            code = torchrun.wait()
        return self._conclude(run, code, meeting)

    def _conclude(self, run: RunDir, code: int, meeting: Rendezvous) -> int:
        """Records how the run ended on this node; returns the exit code of this task."""
        if code == 0 and not self._terminated:
            if meeting.is_head:
                run.set_state("finished", exit_code=0)
            return 0
        if self._terminated:
            # Also when srun ends this task because of another one: then its failure is the reason.
            failure = run.root_failure()
            if failure is None or failure["echo"]:
                run.set_state("cancelled", "the job received SIGTERM", int(Exit.CANCELLED))
            return 1
        failure = self._root_failure(run, code, meeting)
        run.set_state("failed", failure["message"], failure["code"])
        return int(failure["code"])

    def _root_failure(self, run: RunDir, code: int, meeting: Rendezvous) -> dict[str, Any]:
        """The failure that ended the run.

        When the ranks here only lost their peers, the node whose rank failed first gets a moment to
        say so: the end of this task makes srun end that one too.
        """
        where, log = f"node {os.uname().nodename}", self._log(run, meeting)
        if signal_number := killed_by(log):
            name = signal.Signals(signal_number).name
            oom = " (out of memory?)" if signal_number == signal.SIGKILL else ""
            killed = SlurmftError(f"a rank was killed by {name}{oom}", f"log: {log}")
            # A rank that loses its peers may abort; who was killed otherwise is the cause.
            run.add_failure(where, killed, echo=signal_number == signal.SIGABRT)
        deadline = time.monotonic() + _ECHO_WAIT_S
        while (failure := run.root_failure()) is None or failure["echo"]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        unknown = SlurmftError(f"torchrun ended with exit code {code}", f"log: {log}")
        return failure or run.add_failure(where, unknown)

    def _log(self, run: RunDir, meeting: Rendezvous) -> Path:
        return run.logs / f"node-{meeting.node_rank:03d}.log"


def record(run: RunDir, error: Exception) -> int:
    """Records a failure of this node itself; returns the exit code."""
    trace = None if isinstance(error, SlurmftError) else traceback.format_exc()
    shown = error
    if not isinstance(shown, SlurmftError):
        shown = SlurmftError(f"{type(error).__name__}: {error}")
    print(trace or f"error: {shown}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # a full disk takes no record of itself
        run.add_failure(f"node {os.uname().nodename}", shown, trace)
        run.set_state("failed", shown.message, int(shown.code))
    return int(shown.code)


def killed_by(torchrun_log: Path) -> int | None:
    """The signal that ended a rank, by torchrun's words; None: no rank was killed."""
    text = torchrun_log.read_text(encoding="utf-8", errors="replace")
    match = re.search(r"failed \(exitcode: -(\d+)\) local_rank", text)
    return int(match[1]) if match else None


def meeting_point(job: JobConfig, environment: Mapping[str, str]) -> Rendezvous:
    """The rendezvous of this node: Slurm's, or that of a simulated node.

    Raises:
        RendezvousError: neither; or Slurm gave another number of nodes than the run was set up for.
    """
    if LOCAL_NODE in environment:
        port, roll_call_port = rendezvous.ports_from(environment)
        return Rendezvous(
            hosts=tuple(f"127.0.0.{i + 1}" for i in range(job.nodes)),
            node_rank=int(environment[LOCAL_NODE]),
            port=port,
            roll_call_port=roll_call_port,
            id=f"local-{port}",
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


def training_environment(
    profile: NodeProfile, nproc: int, meeting: Rendezvous, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of torchrun and its processes.

    What the user has set in the environment wins over what is found here, but not over flags.
    """
    found = profile.environment(nproc)
    found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_STOP_TIMEOUT_S)
    interface = meeting.socket_interface()
    if interface is None:
        return found | dict(environment)
    # NCCL takes a bare name for a prefix.
    sockets = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    if meeting.interface is not None:  # from --interface
        return found | dict(environment) | sockets
    return found | sockets | dict(environment)


def torchrun_command(run_dir: Path, meeting: Rendezvous, nproc: str) -> list[str]:
    """The torchrun command of a node."""
    # torch matches host names to find the host of the store, which fails where the fabric's name
    # differs from the host's own: say it.
    conf = {
        "is_host": str(meeting.is_head).lower(),
        "join_timeout": _START_TIMEOUT_S,
        "read_timeout": _START_TIMEOUT_S,
    }
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes", str(len(meeting.hosts)),
        "--nproc-per-node", nproc,
        "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{meeting.head}:{meeting.port}",
        "--rdzv-id", meeting.id,
        "--rdzv-conf", ",".join(f"{k}={v}" for k, v in conf.items()),
        "--local-addr", meeting.host,
        "--max-restarts", "0",
        "--log-dir", str(run_dir / "logs" / "torchrun"),
        "--module", "slurmft.rank", str(run_dir),
    ]  # fmt: skip


def main(argv: list[str]) -> None:
    """`python -m slurmft.node RUN_DIR`: the task of one node, started by whoever starts tasks."""
    NodeTask(argv[0])()


if __name__ == "__main__":
    main(sys.argv[1:])
