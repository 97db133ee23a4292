"""What mpirun starts for each rank: `python -m slurmft.node.mpi RUN_DIR`.

It is to its one rank what the task of a node is to torchrun: it finds the place of the rank among
the others from what MPI says, starts it, watches it and hands stop signals on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.core.config import RunConfig
from slurmft.core.errors import Exit, SlurmftError, run_main
from slurmft.core.files import read_json, write_json
from slurmft.node import ccl, rendezvous, signals
from slurmft.node.profiles import Profile
from slurmft.node.rendezvous import Rendezvous, RendezvousError
from slurmft.node.task import NodeTask, host_name, name, use_of_node
from slurmft.node.watchdog import Watchdog
from slurmft.runs.rundir import RunDir, current_attempt

HOSTS = "SLURMFT_MPI_HOSTS"
"""The hosts of the job, with commas between them."""

_OMPI = "OMPI_COMM_WORLD"
_NAMES = (
    (f"{_OMPI}_RANK", f"{_OMPI}_SIZE", f"{_OMPI}_LOCAL_RANK", f"{_OMPI}_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Open MPI's variables, and those of Hydra (Intel MPI, MPICH)."""

_JOB_IDS = ("I_MPI_HYDRA_UUID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Different for each mpirun."""

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among all, and among those of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """The place that MPI has given to this process.

        Raises:
            SlurmftError: no MPI that we know has started it.
        """
        for names in _NAMES:
            if all(environment.get(n, "").isdigit() for n in names):
                return cls(*(int(environment[n]) for n in names))
        raise SlurmftError(
            "neither OMPI_COMM_WORLD_RANK nor PMI_RANK with its local ones is set",
            "start it by mpirun, as `slurmft render mpirun` shows",
        )

    def environment(self, meeting: Rendezvous) -> dict[str, str]:
        """What torchrun would have set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(meeting.node_rank),
            "MASTER_ADDR": meeting.head,
            "MASTER_PORT": str(meeting.port),
        }


class RankTask(NodeTask):
    """The task of one rank, in the words of a node's."""

    def __init__(self, run_dir: str) -> None:
        super().__init__(run_dir)
        self.place = Place.of(os.environ)
        if pmi := os.environ.get("PMI_FD"):  # the rank speaks to mpirun through it
            self._pass_fds = (int(pmi),)

    def _run(self, run: RunDir) -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by which a failed rank ends its torchrun
        threading.Thread(target=self._await_stop, args=(run,), daemon=True).start()
        return super()._run(run)

    def _await_stop(self, run: RunDir) -> None:
        """Hands on the stop of the whole job: mpirun itself would kill the ranks."""
        while not stop_marker(run).exists():
            time.sleep(_LOOK_EVERY_S)
        self._on_signal(signal.SIGTERM, 0)

    def _meet(self, run: RunDir, config: RunConfig) -> Rendezvous:
        check_size(self.place, config)
        meeting = meet(run, config, self.place, os.environ)
        os.environ.update(self.place.environment(meeting))
        if "I_MPI_HYDRA_UUID" in os.environ:
            # oneCCL over MPI has shared memory; torchrun's has not.
            os.environ.setdefault("CCL_ATL_TRANSPORT", "mpi")
            os.environ.setdefault("CCL_PROCESS_LAUNCHER", "hydra")
        return meeting

    def _use_of_node(self, config: RunConfig) -> tuple[Profile, ccl.Binding | None]:
        """Where MPI has bound this rank, it has these cores; else the ranks divide the node's."""
        if not os.sched_getaffinity(0) < os.sched_getaffinity(os.getppid()):
            return use_of_node(config, os.environ)
        alone = dataclasses.replace(config.job, nproc_per_node=1)
        profile, binding = use_of_node(dataclasses.replace(config, job=alone), os.environ)
        return dataclasses.replace(profile, pinned=False, pinning="bound by MPI"), binding

    def _check_meeting(self, meeting: Rendezvous, timeout_s: float) -> None:
        """Of one process a job, not a node: `meet` has done it."""

    def _command(
        self, run: RunDir, config: RunConfig, meeting: Rendezvous, nproc: int
    ) -> list[str]:
        return [sys.executable, "-m", config.program.module, str(run.path)]

    def _supervise(
        self,
        run: RunDir,
        command: list[str],
        environment: Mapping[str, str],
        meeting: Rendezvous,
        watchdog: Watchdog,
    ) -> int:
        """An agreed stop ends with code 0: any other makes mpirun kill ranks that still save."""
        code = super()._supervise(run, command, environment, meeting, watchdog)
        if code == Exit.STOPPED:
            stopped_marker(run).touch()
            return Exit.OK
        return code

    def _say_stopping(self, run: RunDir) -> None:
        """The process that started mpirun says it."""

    def _conclude(self, run: RunDir, code: int, log: Path, start: int) -> int:
        """Records what killed the rank; one that fails by itself has said why."""
        where = f"rank {self.place.rank} on {host_name()}"
        hint = f"log: {run.rank_log(self.place.rank)}"
        if code < 0:
            oom = " (out of memory?)" if code == -signal.SIGKILL else ""
            killed = SlurmftError(f"it was killed by {name(-code)}{oom}", hint)
            run.add_failure(where, killed, secondary=code == -signal.SIGABRT, retry=True)
            return 128 - code
        if run.root_failure() is None:
            unknown = SlurmftError(f"it ended with exit code {code}", hint)
            run.add_failure(where, unknown, retry=bool(run.checkpoint_names()))
        return code


def check_size(place: Place, config: RunConfig) -> None:
    """Raises RendezvousError where mpirun started other ranks than the run was set up for."""
    nodes, nproc = config.job.nodes, config.job.nproc_per_node or 1
    if (place.size, place.local_size) != (nodes * nproc, nproc):
        raise RendezvousError(
            f"the run is set up for {nproc} ranks on each of {nodes} nodes, mpirun started "
            f"{place.size}, {place.local_size} of them on {host_name()}",
            "start it by the command of `slurmft render mpirun`",
        )


def meet(
    run: RunDir, config: RunConfig, place: Place, environment: Mapping[str, str]
) -> Rendezvous:
    """The meeting point: rank 0 chooses ports that are free on its host, and tells the others by a
    file in the run directory.

    Raises:
        RendezvousError: the file does not come, or rank 0 cannot be reached.
    """
    hosts = environment.get(HOSTS, host_name()).split(",")
    mine = own_name(hosts, place.rank // place.local_size)
    job = next((environment[n] for n in _JOB_IDS if n in environment), "")
    meeting_id = f"{run.path.name}.{current_attempt()}.{job}"
    timeout_s = config.job.rdzv_timeout_s
    if place.rank == 0:
        ports = rendezvous.free_ports(str(os.getpid()))
        me = meeting_at({"head": mine, "ports": ports}, hosts, mine, meeting_id, config)
        rendezvous.answer_roll_call(ports[1], meeting_id, me.addresses())
        found: dict[str, Any] = {
            "id": meeting_id,
            "attempt": current_attempt(),
            "head": mine,
            "ports": ports,
        }
        write_json(run.meeting, found)
    else:
        found = await_meeting(run, meeting_id, mine, timeout_s)
        head, port = found["head"], found["ports"][1]
        rendezvous.check_reachable(mine, head, port, meeting_id, timeout_s)
    return meeting_at(found, hosts, mine, meeting_id, config)


def meeting_at(
    found: Mapping[str, Any], hosts: list[str], mine: str, meeting_id: str, config: RunConfig
) -> Rendezvous:
    """The meeting point that rank 0 chose, as the host `mine` sees it."""
    order = [found["head"], *(host for host in hosts if host != found["head"])]
    return Rendezvous(
        hosts=tuple(order),
        node_rank=order.index(mine),
        port=found["ports"][0],
        roll_call_port=found["ports"][1],
        id=meeting_id,
        interface=config.job.interface,
    )


def await_meeting(run: RunDir, meeting_id: str, host: str, timeout_s: float) -> dict[str, Any]:
    """What rank 0 has written.

    Raises:
        RendezvousError: it did not come.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = read_json(run.meeting)
        if found and found["id"] == meeting_id:
            return found
        time.sleep(0.1)
    raise RendezvousError(
        f"{host} does not see what rank 0 writes to {str(run.meeting)!r}",
        "is the run directory on a file system that all hosts share? Or longer: --rdzv-timeout-s",
    )


def own_name(hosts: list[str], expected: int) -> str:
    """This host's name in the list: mpirun may start with another one than the first."""
    candidates = [*hosts[expected : expected + 1], *hosts]
    return next((host for host in candidates if is_here(host)), candidates[0])


def is_here(host: str) -> bool:
    """Whether a name is one of this host's addresses."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)
                return True
    return False


def stop_marker(run: RunDir) -> Path:
    """The file that tells all ranks of an attempt to stop."""
    return run.logs / f"stop-{current_attempt()}"


def stopped_marker(run: RunDir) -> Path:
    """The file that says that the ranks of an attempt have stopped, and saved."""
    return run.logs / f"stopped-{current_attempt()}"


def main(argv: list[str]) -> int:
    signals.block()
    # Within an allocation: those of mpirun's host, for all ranks; and of Slurm's tasks, which the
    # ranks are not.
    for variable in ("SLURMD_NODENAME", "SLURM_CPUS_PER_TASK"):
        os.environ.pop(variable, None)
    RankTask(argv[0]).main()
    return Exit.OK


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
