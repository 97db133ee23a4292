"""What torchrun's agents of a job tell each other beyond torch's own protocol, and how they end.

It goes through their store, to which strangers can connect: they cannot make a mark, but they can
delete or overwrite one. An agent makes its own again as long as it waits for the others.
"""

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from slurmft.core.errors import SlurmftError
from slurmft.node import heartbeat, rank_deaths, sealed
from slurmft.node.connections import clients_of
from slurmft.node.rendezvous import (
    LISTEN,
    START_PORT,
    hold_anywhere,
    listen_anywhere,
)

_LEAVE_TIMEOUT_S = 30
"""How long the head's torchrun outlives its own ranks for the others' torchruns."""
_LEAVE_POLL_S = 0.05
_FINISHED = "slurmft/finished"
"""Prefix of the keys by which torchruns tell each other that their ranks have finished."""
_LEFT = "slurmft/left"
"""Prefix of the keys by which they tell the head that they need its store no longer."""
_START_PORT = "slurmft/start_port"
"""Key of the port on which ranks exchange the checkpoint of a program."""
_MOST_LOSSES = 300
"""So often an agent makes its mark again: torchrun looks ten times a second."""
_LOOK_S = 0.005
"""Between two looks at the marks of all agents, for each of them."""

_MEETING_LOOK_S = 0.1
"""Between two looks of an agent at the state of the rendezvous."""
_MEETING_LOOKS_PER_S = 1000
"""Looks of all agents together."""

_UNSEALED_LOOK_S = 1.0
_UNSEALED_LOOKS = 3
"""So many looks must find values, and no seal."""
_CLIENTS_WITH_RANK = 2
"""Of a store that an agent serves: it is a client of its own store, too."""
_AT_ONCE = timedelta(seconds=1)


class Marks:
    """One mark of each agent in their store."""

    def __init__(self, store: Any, prefix: str, number: int, count: int) -> None:
        self.store = store
        self.number = number
        self.count = count
        self._keys = [f"{prefix}/{agent}" for agent in range(count)]
        self._losses = 0
        """How often the mark of this agent was gone."""
        self._next_look_at = 0.0

    def make(self) -> None:
        """Makes the mark of this agent."""
        self.store.set(self._keys[self.number], "1")

    def are_complete(self) -> bool:
        """Returns whether all agents have made theirs; also where strangers remove this agent's
        again and again, so that the others cannot see it.

        Raises:
            RuntimeError: the store is gone.
        """
        if not self._are_there([self._keys[self.number]]):
            self._losses += 1
            self.make()
        if self._losses > _MOST_LOSSES:
            return True
        now = time.monotonic()
        # Of a thousand agents, each looks every few seconds.
        if now < self._next_look_at:
            return False
        self._next_look_at = now + _LOOK_S * self.count
        return self._are_there(self._keys)

    def have_others(self) -> bool:
        """Returns whether all other agents have made theirs."""
        others = [key for number, key in enumerate(self._keys) if number != self.number]
        return not others or self._are_there(others)

    def _are_there(self, keys: list[str]) -> bool:
        try:
            return bool(self.store.check(keys))
        except RuntimeError as error:
            # What a stranger has written is no mark.
            if sealed.cause_of(error) is None:
                raise
            return False


class Ending:
    """The end of a torchrun, whose ranks may finish before those of the others."""

    def __init__(self) -> None:
        self._marks: dict[Any, Marks] = {}
        """The marks of finished ranks, by the processes of a start."""

    def await_others(self) -> None:
        """Makes a torchrun whose ranks have finished start them again with those of the others.

        When a rank dies, its torchrun waits until all torchruns start their ranks again. torch's
        own do so while their ranks run. One whose ranks have finished does not look, and the job
        stands still for the 300 s that it waits for the others to finish.
        """
        from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
        from torch.distributed.elastic.agent.server.local_elastic_agent import (
            LocalElasticAgent,
        )

        monitor = LocalElasticAgent._monitor_workers
        seals = SealWatch()
        results: dict[Any, Any] = {}  # processes of a start -> how all of them ended

        def monitor_all(agent: Any, group: Any) -> Any:
            ranks = agent._pcontext
            handler = group.spec.rdzv_handler
            seals.look(getattr(handler, "_shared_tcp_store_server", None))
            if ranks not in results:
                result = monitor(agent, group)
                if result.state is not WorkerState.SUCCEEDED:
                    # Of the last death, the task of the node says more.
                    if agent._remaining_restarts > 0:
                        _record_deaths(result)
                    return result
                results[ranks] = result
            if self._have_others_ended(agent, group):
                return results[ranks]
            # As long as its ranks are healthy, the agent looks for others that start theirs again.
            return RunResult(state=WorkerState.HEALTHY)

        def end_at_once(agent: Any) -> None:
            """Does without torch's barrier, for which one key that is deleted is 300 s."""

        agent_type: Any = LocalElasticAgent
        agent_type._monitor_workers = monitor_all
        agent_type._exit_barrier = end_at_once

    def _have_others_ended(self, agent: Any, group: Any) -> bool:
        from torch.distributed.elastic.rendezvous.api import RendezvousError

        ranks = agent._pcontext
        try:
            if ranks not in self._marks:
                marks = Marks(
                    agent._store, _FINISHED, group.group_rank, group.group_world_size
                )
                marks.make()
                self._marks[ranks] = marks
            # The first that leaves closes the rendezvous.
            return self._marks[ranks].are_complete() or bool(
                group.spec.rdzv_handler.is_closed()
            )
        # The torchrun that serves store and rendezvous is gone.
        except (RuntimeError, RendezvousError):
            return True

    def leave(self, served: list[Any]) -> None:
        """Tells the head that this torchrun ends; on the head, waits for the others.

        Args:
            served: the stores of agents that this process serves.
        """
        marks = None
        if self._marks:
            *_, finished = self._marks.values()
            marks = Marks(finished.store, _LEFT, finished.number, finished.count)
        if served:
            wait_for_clients(served, marks)
            return
        if marks is not None:
            with contextlib.suppress(RuntimeError):  # the head is gone
                marks.make()


def wait_for_clients(
    served: list[Any],
    left: Marks | None = None,
    timeout_s: float = _LEAVE_TIMEOUT_S,
) -> None:
    """Waits until no other process is connected to the stores that this process serves, or all
    agents have left.

    All torchruns end together, but the one that serves the store may be the first to be gone. The
    others then lose the connection in the middle of their last exchange, and log a traceback after
    a run that went well.

    Args:
        left: marks of the agents that have left; strangers, who may be connected, make none.
    """
    ports = {store.port for store in served}
    deadline = time.monotonic() + timeout_s
    while _has_clients(ports) and time.monotonic() < deadline:
        if left is not None and left.have_others():
            return
        time.sleep(_LEAVE_POLL_S)


def _has_clients(ports: set[int]) -> bool:
    connections = psutil.Process().net_connections("tcp")
    own_ports = {connection.laddr.port for connection in connections}
    for connection in connections:
        # A socket that listens has no other end.
        if connection.status != psutil.CONN_ESTABLISHED:
            continue
        is_served = connection.laddr.port in ports
        # This process is a client of its own store: it need not wait for itself.
        is_own = connection.raddr.port in own_ports
        if is_served and not is_own:
            return True
    return False


def _record_deaths(result: Any) -> None:
    exit_codes = {}
    for rank, failure in result.failures.items():
        exit_codes[rank] = failure.exitcode
    _despite_errors(lambda: rank_deaths.record(exit_codes))


def _despite_errors(record: Callable[[], None]) -> None:
    """Records something; where that fails, it does not end ranks that can start again."""
    with contextlib.suppress(OSError, SlurmftError):
        record()


class SealWatch:
    """Looks whether the ranks seal what they write into the store that this agent serves.

    A program may start Python so that they are not there: `python -I`, a PYTHONPATH of its own.
    """

    def __init__(self) -> None:
        self._store: Any = None
        """The store that is looked into."""
        self._looks_left = 0
        self._next_look_at = 0.0

    def look(self, store: Any) -> None:
        """Looks now and then; leaves the mark `heartbeat.UNSEALED` where nothing is sealed.

        Args:
            store: that of the ranks, as torch's own; None: another agent serves it.
        """
        now = time.monotonic()
        if store is not self._store:
            self._store = store
            self._looks_left = _UNSEALED_LOOKS
            self._next_look_at = now
        folder = os.environ.get(heartbeat.FOLDER)
        secret = sealed.secret_of(os.environ)
        has_work = store is not None and self._looks_left and folder and secret
        if not has_work or now < self._next_look_at:
            return
        self._next_look_at = now + _UNSEALED_LOOK_S
        is_sealed = _has_seals(store, secret)
        if is_sealed:
            self._looks_left = 0
        # A stranger may write as soon as rank 0 is connected: not the first look decides.
        elif is_sealed is False:
            self._looks_left -= 1
            if not self._looks_left:
                Path(str(folder), heartbeat.UNSEALED).touch()


def _has_seals(store: Any, secret: str) -> bool | None:
    """Returns whether values in a store are sealed; None: no rank has written yet."""
    from slurmft.node.sealed_store import is_sealed

    # torch 2.8, to which oneCCL is bound, cannot say which keys there are.
    if not hasattr(store, "list_keys"):
        return None
    # Before rank 0 is connected, the values are a stranger's.
    if clients_of(store.port, from_others=False) < _CLIENTS_WITH_RANK:
        return None
    store.set_timeout(_AT_ONCE)
    seen = None
    try:
        for key in store.list_keys():
            # torch counts its clients there, where they are not sealed.
            if key == "init/" or not store.check([key]):
                continue
            seen = False
            if is_sealed(secret, store.port, key, store.get(key)):
                return True
    except RuntimeError:  # a key was deleted meanwhile
        return None
    return seen


def serve_ranks() -> None:
    """Makes the agent of rank 0 serve the store of the ranks, a new one at each of their starts.

    It listens before others can read its port, so that nobody takes the port first. torch would use
    one store for all starts: restarted ranks could read the addresses of those that died.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler,
    )

    handler_type: Any = DynamicRendezvousHandler
    next_rendezvous = handler_type.next_rendezvous

    def meet_anew(handler: Any) -> Any:
        poll_often(handler)
        # Each before it meets the others, who read them when all have met.
        _despite_errors(rank_deaths.keep_calls)
        handler._start_port = None
        handler._bootstrap_store_info = None
        handler._shared_tcp_store_server = None
        info = next_rendezvous(handler)
        if info.rank == 0:
            _despite_errors(rank_deaths.tell_mismatch)
            # Others can read the port before rank 0 listens.
            handler._start_port = hold_anywhere(_address())
            _, port, *_ = handler._start_port.getsockname()
            info.store.set(_START_PORT, str(port))
        os.environ[START_PORT] = info.store.get(_START_PORT).decode()
        return info

    def serve(handler: Any, host_name: str, port: int) -> Any:
        address = _address()
        port, descriptor = listen_anywhere(address)
        return TCPStore(
            address or host_name,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=descriptor,
        )

    handler_type.next_rendezvous = meet_anew
    handler_type._create_tcp_store_server = serve


def poll_often(handler: Any) -> None:
    """Makes an agent look at the state of the rendezvous ten times a second, where the agents are
    few. torch's own look once: a start that needs three looks takes three seconds."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.elastic.rendezvous.utils import _delay

    pause_s = max(_MEETING_LOOK_S, handler._settings.max_nodes / _MEETING_LOOKS_PER_S)

    def delay(seconds: float | tuple[float, float]) -> None:
        if not isinstance(seconds, tuple):
            seconds = min(seconds, pause_s)
        _delay(seconds)

    module: Any = dynamic_rendezvous
    module._delay = delay
    # A state that is younger is not asked for again.
    state = handler._state_holder
    state._cache_duration = min(state._cache_duration, pause_s)


def _address() -> str:
    """Returns the address of this node on which its processes listen; "": all."""
    _, _, address = os.environ.get(LISTEN, "").partition("=")
    return address
