"""The task that mpirun starts for each rank: `python -m slurmft.plugins.mpirun.rank RUN_DIR`.

It is to its one rank what the task of a node is to torchrun. The rank's place among the others is
in MPI's variables.
"""

import dataclasses
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from slurmft.core import decode, descent, interpreter, trusted
from slurmft.core.config import RunConfig
from slurmft.core.errors import Exit, SlurmftError, run_main
from slurmft.core.files import exists_now, write_json
from slurmft.core.program import kind_of
from slurmft.core.run_files import Failure, current_attempt
from slurmft.node import sealed, signals
from slurmft.node.hardware import host_name
from slurmft.node.memory_kills import killed
from slurmft.node.peers import STOP, Peers
from slurmft.node.preparation import use_of_node
from slurmft.node.rendezvous import (
    HOSTS,
    Rendezvous,
    RendezvousError,
    answer_checks,
    check_reachable,
    free_ports,
    own_addresses,
    reserved_descriptors,
)
from slurmft.node.supervisor import Child, Supervisor, await_cause, run_task
from slurmft.node.task import run_child
from slurmft.runs import frozen_code
from slurmft.runs.rundir import RunDir

_OMPI = "OMPI_COMM_WORLD"
# Open MPI's variables, and those of Hydra (Intel MPI, MPICH).
_NAMES = (
    (f"{_OMPI}_RANK", f"{_OMPI}_SIZE", f"{_OMPI}_LOCAL_RANK", f"{_OMPI}_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

_LOOK_EVERY_S = 1.0

SECRETS = trusted.Door(
    "the secrets of an attempt by mpirun",
    "`RUN/.secrets.slurmft-N-0000`",
    "with which seals ranks take each other's values",
)
# A form of `removal.ASIDE`: what a launcher that was killed has left is for `slurmft clean`, too.
SECRETS_NAME = re.compile(r"\.secrets\.slurmft-\d+-0000")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank among all ranks, and among the ranks of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Place":
        """Reads the place that MPI has given to this process.

        Raises:
            SlurmftError: MPI has not started this process.
        """
        for names in _NAMES:
            values = [environment.get(name, "") for name in names]
            if all(value.isdigit() for value in values):
                return cls(*map(int, values))
        raise SlurmftError(
            "neither OMPI_COMM_WORLD_RANK nor PMI_RANK and its local counterparts are set",
            "start it by `slurmft submit --cluster mpirun`",
        )

    def environment(self, rendezvous: Rendezvous) -> dict[str, str]:
        """Returns the variables that torchrun would have set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(rendezvous.node_rank),
            "MASTER_ADDR": rendezvous.head,
            "MASTER_PORT": str(rendezvous.port),
        }


def run_rank(supervisor: Supervisor, place: Place) -> int:
    """Runs one rank; returns its exit code."""
    run = supervisor.run
    # a failed rank sends it, to end torchrun
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    config = run.join()
    # First: what follows, and the rank itself, has them in its environment.
    os.environ.update(secrets_of(run))
    # Once on each node.
    if place.local_rank == 0:
        frozen_code.check(run, config)
    run.settle_permissions()
    # Before the ranks meet: one that mpirun did not start would be waited for in vain.
    check_size(place, config)
    rendezvous, supervisor.peers = join(run, config, place, os.environ)
    # A program that does not attach opens the port itself.
    if place.rank == 0 and kind_of(config.program).attaches:
        os.environ.update(rendezvous.reserve_port(os.environ))
    # A daemon: it may wait for ever, and must not keep the rank from its end.
    threading.Thread(target=_await_stop, args=(supervisor,), daemon=True).start()
    os.environ.update(place.environment(rendezvous))
    if "I_MPI_HYDRA_UUID" in os.environ:
        # oneCCL over MPI has shared memory; torchrun's has not.
        os.environ.setdefault("CCL_ATL_TRANSPORT", "mpi")
        os.environ.setdefault("CCL_PROCESS_LAUNCHER", "hydra")
    profile = use_of_node(
        config, os.environ, for_rank=True, is_bound=binds_ranks(os.environ)
    )
    code = run_child(
        supervisor,
        _child(supervisor, config, place),
        config,
        rendezvous,
        profile,
    )
    # any exit code but 0 makes mpirun kill ranks that still save
    if code == Exit.STOPPED:
        stopped_marker(run).touch()
        return Exit.OK
    return code


def binds_ranks(environment: Mapping[str, str]) -> bool:
    """Returns whether variables of the user's have Intel MPI bind ranks to cores, as
    I_MPI_PIN_DOMAIN does, also beside I_MPI_PIN=0."""
    names = [name for name in environment if name.startswith("I_MPI_PIN")]
    # What we set ourselves, where the user has set none.
    is_off = environment.get("I_MPI_PIN", "").lower() in _OFF
    if is_off:
        names.remove("I_MPI_PIN")
    return bool(names)


_OFF = ("0", "no", "off", "disable")
"""Values by which a switch of Intel MPI is off."""


def _await_stop(supervisor: Supervisor) -> None:
    """Passes on the stop of the whole job: mpirun itself would kill the ranks. The first rank looks
    for the stop's file, and tells the others."""
    peers = supervisor.peers
    if peers.is_head:
        while not exists_now(stop_marker(supervisor.run)):
            time.sleep(_LOOK_EVERY_S)
        peers.tell(STOP)
    peers.heard(STOP, wait_s=None)
    supervisor.stop(signal.SIGTERM)


def check_size(place: Place, config: RunConfig) -> None:
    """Checks that mpirun started the ranks that the run is set up for; raises RendezvousError."""
    nodes = config.job.nodes
    nproc = config.job.nproc_per_node or 1
    if (place.size, place.local_size) != (nodes * nproc, nproc):
        raise RendezvousError(
            f"the run is set up for {nproc} ranks on each of {nodes} nodes, but mpirun started "
            f"{place.size}, {place.local_size} of them on {host_name()}",
            "start it by `slurmft submit --cluster mpirun`",
        )


def _child(supervisor: Supervisor, config: RunConfig, place: Place) -> Child:
    descriptors = reserved_descriptors(os.environ)
    pmi = os.environ.get("PMI_FD")  # the rank speaks to mpirun by it
    if pmi:
        descriptors += (int(pmi),)
    return Child(
        command=interpreter.module(config.program.module, str(supervisor.run.path)),
        record_failure=lambda code, log, start: record_rank_failure(
            supervisor, place.rank, code
        ),
        tasks=place.size,
        others=place.size - 1,
        rdzv_timeout_s=config.job.rdzv_timeout_s,
        records_stop=False,  # the process that started mpirun does
        pass_fds=descriptors,
    )


def record_rank_failure(supervisor: Supervisor, rank: int, code: int) -> int:
    """Records what killed a rank; a rank that failed by itself has recorded why."""
    run = supervisor.run
    where = f"rank {rank} on {host_name()}"
    hint = f"log: {run.rank_log(rank)}"
    if code < 0:
        is_secondary = code == -signal.SIGABRT  # a rank that loses its peers may abort
        error = killed("it", -code, supervisor.memory_kills, hint)
        run.add(Failure.of(where, error, secondary=is_secondary, retry=True))
        # A shell's code for it: 128 and the number of the signal, which is negative here.
        return 128 - code
    failure = run.root_failure(current_attempt(), f"rank-{rank}-*")
    if failure is None:
        unknown = SlurmftError(f"it ended with exit code {code}", hint)
        # With a checkpoint, the program has worked for a while: another start may do.
        has_checkpoint = bool(run.newest_checkpoint())
        run.add(Failure.of(where, unknown, retry=has_checkpoint))
    elif failure.secondary:
        # The end of this task makes mpirun kill the others, also one that has yet to say what
        # killed its rank.
        await_cause(supervisor.peers)
    return code


# --- rendezvous -----------------------------------------------------------------------------------


def join(
    run: RunDir,
    config: RunConfig,
    place: Place,
    environment: Mapping[str, str],
) -> tuple[Rendezvous, Peers]:
    """Joins the rendezvous; returns it, checked, and the connections.

    Rank 0 chooses ports that are free on its host, and tells the others by a file in the run
    directory.
    """
    hosts = environment.get(HOSTS, host_name()).split(",")
    host = own_name(hosts, place.rank // place.local_size)
    id = rendezvous_id(run, current_attempt())
    secret = sealed.secret_of(environment)
    if place.rank == 0:
        port, check_port = free_ports()
        rendezvous = Rendezvous(
            hosts=tuple(dict.fromkeys([host, *hosts])),
            node_rank=0,
            port=port,
            check_port=check_port,
            id=id,
            interface=config.job.interface,
        )
        peers = answer_checks(check_port, id, secret, rendezvous.addresses())
        # Rank 0 listens by now: whoever reads the file connects at once.
        write_json(run.rendezvous, dataclasses.asdict(rendezvous))
        return rendezvous, peers
    timeout_s = config.job.rdzv_timeout_s
    of_head = await_rendezvous(run, id, host, timeout_s)
    rendezvous = dataclasses.replace(of_head, node_rank=of_head.hosts.index(host))
    port = rendezvous.check_port
    _, peers = check_reachable(host, rendezvous.head, port, id, secret, timeout_s)
    return rendezvous, peers


def rendezvous_id(run: RunDir, attempt: int) -> str:
    """Returns the id of an attempt's rendezvous, by the secret in this environment."""
    return f"{run.path.name}.{attempt}.{sealed.tag(sealed.secret_of(os.environ))}"


def await_rendezvous(
    run: RunDir,
    id: str,
    host: str,
    timeout_s: float,
) -> Rendezvous:
    """Waits for what rank 0 writes: the rendezvous, as rank 0 sees it.

    Raises:
        RendezvousError: it did not appear.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.1
    while time.monotonic() < deadline:
        if exists_now(run.rendezvous):
            rendezvous = decode.read(run.rendezvous, Rendezvous)
            if rendezvous is not None and rendezvous.id == id:
                return rendezvous
        time.sleep(pause_s)
        pause_s *= 1.5  # there may be thousands of ranks
    raise RendezvousError(
        f"{host} does not see what rank 0 writes to {str(run.rendezvous)!r}",
        "is the run directory on a file system that all hosts share? Else wait longer: "
        "--rdzv-timeout-s",
    )


def own_name(hosts: list[str], expected: int) -> str:
    """Returns this host's name in the list. mpirun may start with another host than the first."""
    # The expected host comes first: mostly it is this one, and no other name is looked up.
    # A slice of one: it is empty where the list is shorter.
    expected_host = hosts[expected : expected + 1]
    candidates = [*expected_host, *hosts]
    for host in candidates:
        if own_addresses(host):
            return host
    return candidates[0]


def secrets_of(run: RunDir) -> dict[str, str]:
    """Returns the secrets that the ranks of this attempt share, and the user's tokens.

    Raises:
        NotOwnError: others can have written them.
        OSError, ValueError: they cannot be read.
    """
    return decode.loads(SECRETS.read(secrets_path(run)), dict[str, str])


def secrets_path(run: RunDir) -> Path:
    # A name of each attempt's own: NFS may still show the file of the one before.
    return run.path / f".secrets.slurmft-{current_attempt()}-0000"


def stop_marker(run: RunDir) -> Path:
    """Returns the file whose presence tells all ranks of an attempt to stop."""
    return descent.through(run.logs) / f"stop-{current_attempt()}"


def stopped_marker(run: RunDir) -> Path:
    """Returns the file whose presence says that the ranks of an attempt have saved and stopped."""
    return descent.through(run.logs) / f"stopped-{current_attempt()}"


def main(argv: list[str]) -> NoReturn:
    # Within an allocation, these have the values of mpirun's host for all ranks. The ranks are no
    # tasks of Slurm.
    for variable in ("SLURMD_NODENAME", "SLURM_CPUS_PER_TASK"):
        os.environ.pop(variable, None)
    signals.block()
    place = Place.of(os.environ)
    run_task(argv[0], lambda supervisor: run_rank(supervisor, place))


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
