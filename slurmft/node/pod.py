"""The task of one pod of a Kubernetes job: `python -m slurmft.node.pod CONFIG RUN_DIR`.

What a node's task is under Slurm. The operator says how many pods there are and where they meet
(the PET_* variables, which torchrun reads, too); the configuration comes with the manifest.

An attempt is a life of the first pod: torchrun's store lives in it, so that all others end when it
does. Another pod that starts again joins the attempt under way, whose number the first one tells.
"""

from __future__ import annotations

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
from slurmft.node import rendezvous
from slurmft.node.rendezvous import Rendezvous, RendezvousError
from slurmft.node.task import NodeTask, host_name, record, torchrun_command
from slurmft.runs import attempts
from slurmft.runs.rundir import ATTEMPT, RunDir, current_attempt

_PORT = 29400


class PodTask(NodeTask):
    """A node's task, whose number of peers may change where the job is elastic."""

    def __init__(self, config: str, run_dir: str) -> None:
        super().__init__(run_dir)
        self.config = Path(config)

    def _run(self, run: RunDir) -> int:
        """The first pod keeps the state: there is no batch script."""
        index = pod_index(os.environ)
        config = RunConfig.from_json(self.config.read_text(encoding="utf-8"))
        make_run(run, config, index == 0)
        if index:
            return super()._run(run)
        os.environ[ATTEMPT] = str(attempts.begin(run, [host_name()], host_name()))
        try:
            code = super()._run(run)
        except Exception as error:
            code = record(run, error)
        attempts.await_failure(run, code)
        return attempts.end(run, code).code

    def _meet(self, run: RunDir, config: RunConfig) -> Rendezvous:
        """With the attempt's number in the meeting's id: the first pod tells it to the others."""
        point = meeting_point(config, os.environ)
        port, timeout_s = point.roll_call_port, config.job.rdzv_timeout_s
        if point.is_head:
            meeting_id = f"{point.id}.{current_attempt()}"
            rendezvous.answer_roll_call(port, meeting_id)
        else:
            meeting_id = rendezvous.check_reachable(
                point.host, point.head, port, point.id, timeout_s, attempts=True
            )
            os.environ[ATTEMPT] = meeting_id.rpartition(".")[2]
        return dataclasses.replace(point, id=meeting_id)

    def _check_meeting(self, meeting: Rendezvous, timeout_s: float) -> None:
        """`_meet` has done it."""

    def _is_over_elsewhere(self, run: RunDir) -> bool:
        """Never: a stop is meant for this pod alone, not sent because another one has failed."""
        return False

    def _command(
        self, run: RunDir, config: RunConfig, meeting: Rendezvous, nproc: int
    ) -> list[str]:
        nnodes = os.environ.get("PET_NNODES", "1")
        module, restarts = config.program.module, config.job.max_restarts
        return torchrun_command(module, run.path, meeting, str(nproc), restarts, nnodes)


def pod_index(environment: Mapping[str, str]) -> int:
    """The pod's number among its peers: TrainJob says it, PyTorchJob puts it into the name."""
    number = environment.get("PET_NODE_RANK") or environment.get("RANK")
    if number is None:
        match = re.search(r"-(\d+)$", environment.get("HOSTNAME", socket.gethostname()))
        number = match[1] if match else "0"
    return int(number)


def meeting_point(config: RunConfig, environment: Mapping[str, str]) -> Rendezvous:
    """Where the pods meet: at the first.

    Raises:
        RendezvousError: the operator does not say where, or the name stays unknown.
    """
    endpoint = environment.get("PET_RDZV_ENDPOINT") or ":".join(
        environment.get(name, "") for name in ("PET_MASTER_ADDR", "PET_MASTER_PORT")
    )
    head, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
    if not head:
        raise RendezvousError(
            "neither PET_RDZV_ENDPOINT nor PET_MASTER_ADDR is set: no operator started this pod",
            "apply what `slurmft render kubernetes` prints",
        )
    address = await_name(head, config.job.rdzv_timeout_s)
    index = pod_index(environment)
    return Rendezvous(
        # Between the first and this one it does not matter who the others are.
        hosts=(head,) if index == 0 else (*(head,) * index, address),
        node_rank=index,
        port=int(port or _PORT),
        roll_call_port=int(port or _PORT) + 1,  # a pod's ports are all its own
        id=environment.get("PET_RDZV_ID") or head.partition(".")[0],
        interface=config.job.interface,
        grows=True,
    )


def await_name(head: str, timeout_s: float) -> str:
    """This pod's address towards the first one, whose name is known once that has an address."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return rendezvous.address_towards(head)
        except RendezvousError:
            if time.monotonic() > deadline:
                raise
        time.sleep(1)


def make_run(run: RunDir, config: RunConfig, first: bool) -> None:
    """The run directory, on the volume that all pods share: made by the first, unless it is there
    from an earlier life of the job.

    Raises:
        UsageError: the one that is there trains something else.
        RendezvousError: the first pod does not make it.
    """
    deadline = time.monotonic() + config.job.rdzv_timeout_s
    permissions.settle(config.job.share_with_group)
    if first and not run.config.is_file():
        run.make_folders(config)
        write_text(run.config, config.to_json())
        run.set_state("submitted")
    elif first:
        before = run.load_config()
        if before.program != config.program:
            raise UsageError(
                f"{str(run.path)!r} is a run of the same name that trains something else",
                "give this one another: slurmft render kubernetes --name NAME",
            )
        if before.job != config.job:  # on other nodes, as after `slurmft resume --nodes`
            write_text(run.config, config.to_json())
    while not run.config.is_file():
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"the first pod makes no {str(run.config)!r}",
                "is the volume mounted by all pods (ReadWriteMany)?",
            )
        time.sleep(1)


def main(argv: list[str]) -> None:
    PodTask(argv[0], argv[1]).main()


if __name__ == "__main__":
    main(sys.argv[1:])
