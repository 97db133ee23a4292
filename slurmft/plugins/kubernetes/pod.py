"""The task of one pod of a Kubernetes job:
`python -m slurmft.plugins.kubernetes.pod CONFIG RUN_DIR`.

It is what the task of a node is under Slurm. The operator sets how many pods there are and where
the first one is (the PET_* variables, which torchrun reads, too); the configuration comes with the
manifest.

An attempt lasts as long as the first pod: torchrun's store is in it, so that all others end when it
does. Another pod that is restarted joins the running attempt, whose number the first one tells.
"""

import dataclasses
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from slurmft.core import permissions
from slurmft.core.config import RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.files import write_text
from slurmft.core.run_files import ATTEMPT, current_attempt
from slurmft.node import sealed
from slurmft.node.hardware import host_name
from slurmft.node.peers import Peers
from slurmft.node.rendezvous import (
    Rendezvous,
    RendezvousError,
    address_towards,
    answer_checks,
    check_reachable,
)
from slurmft.node.supervisor import Supervisor, record_error, run_task
from slurmft.node.task import reserve_port, run_torchrun
from slurmft.runs import attempts, hung_collective
from slurmft.runs.rundir import RunDir

_PORT = 29400
"""torchrun's own default."""
_RETRY_S = 1


def run_pod(supervisor: Supervisor, config: RunConfig) -> int:
    """Runs this pod's share of the job; the first pod keeps the run's state, as no batch script
    does."""
    run = supervisor.run
    is_first = pod_index(os.environ) == 0
    make_run(run, config, is_first)
    if not is_first:  # state and attempts are the first pod's alone
        return run_ranks(supervisor)
    # Before the others can meet this pod: `join` tells them the number.
    host = host_name()
    attempts.begin(run, [host], host)
    try:
        code = run_ranks(supervisor)
    except Exception as error:
        # Recorded, not raised: the run must get its state, which nobody else writes.
        code = record_error(run, error)
    # The volume may show only later what another pod has written: why its rank failed.
    attempts.await_failure(run, code)
    hung_collective.record(run, current_attempt())
    outcome = attempts.decide(run, code)
    attempts.end(run, outcome)
    return outcome.code


def run_ranks(supervisor: Supervisor) -> int:
    """Runs torchrun in this pod; returns the task's exit code."""
    run = supervisor.run
    config = run.load_config()
    run.settle_permissions()
    rendezvous, supervisor.peers = join(config)
    reserve_port(config, rendezvous)
    # "2:4" in an elastic PyTorchJob: torchrun then goes on with fewer pods.
    nodes = os.environ.get("PET_NNODES", "1")
    # A stop is meant for this pod alone: no other's failure has sent it.
    return run_torchrun(supervisor, config, rendezvous, nodes, ends_with_others=False)


def join(config: RunConfig) -> tuple[Rendezvous, Peers]:
    """Joins the rendezvous; returns it, checked, and the connections. Its id has the attempt's
    number: the first pod tells the others."""
    rendezvous = rendezvous_of(config, os.environ)
    port = rendezvous.check_port
    # That of the manifest: an attempt has one of its own, which nobody has sealed anything with.
    secret = sealed.secret_of(os.environ)
    if not secret:
        raise RendezvousError(
            f"{sealed.SECRET} is not set: the manifest of this pod has no Secret",
            "apply what `slurmft render kubernetes` prints now",
        )
    if rendezvous.is_head:
        tag = sealed.tag(sealed.new_secret())
        rendezvous_id = f"{rendezvous.id}.{current_attempt()}.{tag}"
        peers = answer_checks(port, rendezvous_id, secret)
    else:
        rendezvous_id, peers = check_reachable(
            rendezvous.host,
            rendezvous.head,
            port,
            rendezvous.id,
            secret,
            config.job.rdzv_timeout_s,
            attempts=True,
        )
        # For the ranks, too: their failures are of this attempt.
        os.environ[ATTEMPT] = rendezvous_id.split(".")[-2]
    os.environ[sealed.SECRET] = sealed.derive(secret, rendezvous_id)
    return dataclasses.replace(rendezvous, id=rendezvous_id), peers


def pod_index(environment: Mapping[str, str]) -> int:
    """Reads the pod's number among its peers: from a variable (TrainJob) or its name
    (PyTorchJob)."""
    # RANK is the operator's here: this process is none of torchrun's ranks, but starts it.
    number = environment.get("PET_NODE_RANK") or environment.get("RANK")
    if number is not None:
        return int(number)
    # A PyTorchJob's pods are called JOB-worker-0, JOB-worker-1, ...
    name = environment.get("HOSTNAME", socket.gethostname())
    match = re.search(r"-(\d+)$", name)
    if match is None:
        return 0
    return int(match[1])


def rendezvous_of(config: RunConfig, environment: Mapping[str, str]) -> Rendezvous:
    """Returns the rendezvous of the pods, at the first of them.

    Raises:
        RendezvousError: the operator does not name the first pod, or its name does not resolve.
    """
    head, port = _endpoint(environment)
    if not head:
        raise RendezvousError(
            "neither PET_RDZV_ENDPOINT nor PET_MASTER_ADDR is set: no operator started this pod",
            "apply what `slurmft render kubernetes` prints",
        )
    address = await_name(head, config.job.rdzv_timeout_s)
    index = pod_index(environment)
    hosts = [head]
    if index > 0:
        # Nobody asks for the pods between the first and this one: the first stands for them.
        hosts = [head] * index + [address]
    return Rendezvous(
        hosts=tuple(hosts),
        node_rank=index,
        port=port,
        check_port=port + 1,  # a pod's ports are all its own
        id=environment.get("PET_RDZV_ID") or head.partition(".")[0],
        interface=config.job.interface,
        elastic=True,  # a pod knows the first one and itself, not the others
    )


def _endpoint(environment: Mapping[str, str]) -> tuple[str, int]:
    """Returns host and port of the first pod; no host where the operator has not set it."""
    endpoint = environment.get("PET_RDZV_ENDPOINT")
    if not endpoint:
        address = environment.get("PET_MASTER_ADDR", "")
        endpoint = f"{address}:{environment.get('PET_MASTER_PORT', '')}"
    if ":" not in endpoint:
        return endpoint, _PORT
    head, _, port = endpoint.rpartition(":")
    return head, int(port or _PORT)


def await_name(head: str, timeout_s: float) -> str:
    """Waits until the first pod's name resolves, which it does once that has an address; returns
    this pod's address towards it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return address_towards(head)
        except RendezvousError:
            if time.monotonic() > deadline:
                raise
        # The operator's DNS entry comes after the pod itself.
        time.sleep(_RETRY_S)


def make_run(run: RunDir, config: RunConfig, first: bool) -> None:
    """Makes the run directory on the volume that all pods share: the first pod does, unless it is
    there from an earlier start of the job; the others wait for it.

    Raises:
        UsageError: the one that is there runs another program.
        RendezvousError: the first pod does not make it.
    """
    deadline = time.monotonic() + config.job.rdzv_timeout_s
    # Before any file is made: the modes depend on it.
    permissions.settle(config.job.share_with_group)
    if first and not run.config.is_file():
        if not run.make(config):
            raise UsageError(
                f"{str(run.path)!r} is there, and is no run",
                "remove it, or give another name: slurmft render kubernetes --name NAME",
            )
        # The other pods wait for this file: the folders are there before it.
        write_text(run.config, config.to_json())
        run.set_state("submitted")
    elif first:
        before = run.load_config()
        # An operator starts a pod again with the same manifest: that resumes the run.
        if before.program != config.program:
            raise UsageError(
                f"{str(run.path)!r} is a run of the same name with another program",
                "give this one another name: slurmft render kubernetes --name NAME",
            )
        # on other nodes, as after `slurmft resume --nodes`
        if before.job != config.job:
            write_text(run.config, config.to_json())
    while not run.config.is_file():
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"the first pod has not written {str(run.config)!r}",
                "is the volume mounted by all pods (ReadWriteMany)?",
            )
        time.sleep(_RETRY_S)


def main(argv: list[str]) -> None:
    config = Path(argv[0])

    def task(supervisor: Supervisor) -> int:
        return run_pod(
            supervisor, RunConfig.from_json(config.read_text(encoding="utf-8"))
        )

    run_task(argv[1], task)


if __name__ == "__main__":
    main(sys.argv[1:])
