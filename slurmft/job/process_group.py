"""The process group: its backend, agreement between ranks, sums, gathers and broadcasts."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from slurmft.core.errors import SlurmftError
from slurmft.job import devices, objects
from slurmft.job.backend import agree
from slurmft.node import flight_recorder, torchrun
from slurmft.node.peers import says_lost_peer

_TIMEOUT = timedelta(minutes=30)
"""For collectives between steps."""
_CONTROL = "slurmft"
"""How torch describes the group for requests and objects."""
_CONTROL_TIMEOUT = timedelta(days=2)
"""For requests and objects. Ranks may wait long for the main one, which reads data; hangs are the
watchdog's to find."""

_EVALUATE_WAITED = (
    "Expected to find locked file",
    "Cannot acquire lock on cached file",
)
"""evaluate's messages about a rank that has not written its file, for whatever reason."""


class PeerFailedError(SlurmftError):
    """The failure of another rank, whose own error is the one to read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks of a run, as one of them sees it."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str
    control: Any
    """A gloo group of all ranks, for requests and objects."""
    owned: bool = True
    """Whether the process group was set up here, not by the program."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Does `work` on the main rank while the others wait; returns its result on every rank, as
        `share_object` does.

        Raises:
            Exception: on the main rank, what `work` raises; nobody hangs.
            PeerFailedError: on the others, with the message of that.
        """
        # As JSON here: a value that cannot be sent is an error of the work.
        value, error = _attempt(self.is_main, lambda: objects.as_json(work()))
        # The error goes out with the value, so that no rank waits for one that will not come.
        value, message = self.share_object((value, _describe(error)))
        if error is not None:
            raise error
        if message:
            raise PeerFailedError(f"rank 0 failed: {message}")
        return value

    def on_some(self, chosen: bool, work: Callable[[], Any]) -> None:
        """Does `work` on the ranks that are chosen, while the others wait.

        Raises:
            Exception: on a rank where `work` raises it; nobody hangs.
            PeerFailedError: on the others, with the message of that.
        """
        _, error = _attempt(chosen, work)
        # Every rank sends, idle ones, too: the error of one must not leave others waiting.
        messages = self.all_objects(_describe(error))
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message:
                raise PeerFailedError(f"rank {rank} failed: {message}")

    def sum(self, values: Sequence[float] | torch.Tensor) -> list[float]:
        """Sums `values` over all ranks, element by element, as doubles."""
        # A copy: the sum is made in place, and the caller keeps its values.
        tensor = torch.as_tensor(values, dtype=torch.float64).to(self.device, copy=True)
        dist.all_reduce(tensor)
        return [float(v) for v in tensor.tolist()]

    def all_values(self, value: float) -> list[float]:
        """Returns a value of every rank, by rank."""
        # A sum of zeros and one value: an object would go by the control group.
        values = [0.0] * self.size
        values[self.rank] = value
        return self.sum(values)

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's value, by rank, on the main rank; an empty list elsewhere."""
        return objects.gather(value, self.control)

    def all_objects(self, value: Any) -> list[Any]:
        """Returns every rank's value, by rank, on every rank."""
        return objects.all_gather(value, self.control)

    def share_object(self, value: Any, source: int = 0) -> Any:
        """Returns one rank's value, as JSON has it, on every rank. Others pass anything."""
        return objects.broadcast(value, source, self.control)

    def share_tensors(
        self, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the main rank's CPU tensors, on every rank, bit by bit. Others pass anything."""
        layouts: dict[str, Any] = {}
        if self.is_main:
            for name, tensor in tensors.items():
                layouts[name] = (list(tensor.shape), str(tensor.dtype))
        # Layouts first: the others have nothing of which they could know shapes and types.
        layouts = self.share_object(layouts)
        shared = {}
        for name, (shape, dtype) in layouts.items():
            if self.is_main:
                tensor = tensors[name]
            else:
                type_name = dtype.removeprefix("torch.")
                tensor = torch.empty(shape, dtype=getattr(torch, type_name))
            flat = tensor.contiguous().reshape(-1)
            if flat.numel():
                # As bytes: gloo does not know every type.
                dist.broadcast(flat.view(torch.uint8), src=0, group=self.control)
            shared[name] = flat.reshape(shape)
        return shared


def _attempt(is_here: bool, work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Does `work`, if it is this rank's; returns its result, or None, and what it raises."""
    if not is_here:
        return None, None
    try:
        return work(), None
    except Exception as error:
        return None, error


def _describe(error: Exception | None) -> str:
    if error is None:
        return ""
    return f"{type(error).__name__}: {error}"


def leave() -> None:
    """Leaves the process group, after the last collective: a rank that just exits looks dead."""
    dist.destroy_process_group()


def init(backend: str, connecting: Callable[[str], object] | None = None) -> World:
    """Sets up the process group of torchrun's ranks; one that the program has set up is used.

    Accelerate uses a process group that is there: so it works with ccl, too.

    Args:
        connecting: is called with the backend when all ranks are there, before the first of their
            collectives. These connect them, and may hang.

    Raises:
        SlurmftError: as `backend.choose`.
    """
    owned = not dist.is_initialized()
    if owned:
        # Before the rendezvous: torch's stores would listen on all addresses of the node.
        torchrun.bind_stores()
        store, rank, size = next(rendezvous("env://", timeout=_TIMEOUT))
        name = agree(backend, store, rank, size)
    else:
        name = dist.get_backend()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if name in ("nccl", "xccl"):
        device = devices.take(local_rank)
    if owned:
        if connecting:
            connecting(name)
        # After the device is taken: nccl asks which it is.
        dist.init_process_group(
            name, store=store, rank=rank, world_size=size, timeout=_TIMEOUT
        )
        # The first collective connects the ranks. Where that hangs, it is here, of which
        # `connecting` has told, and not in the first step.
        dist.all_reduce(torch.zeros(1, device=device))
    flight_recorder.serve()
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        device=device,
        backend=name,
        # gloo, also beside nccl: requests lie in the memory of the host, and must not wait for the
        # work that is queued on the GPU.
        control=dist.new_group(
            backend="gloo", timeout=_CONTROL_TIMEOUT, group_desc=_CONTROL
        ),
        owned=owned,
    )


def is_secondary(error: BaseException) -> bool:
    """Returns whether an error only says that another rank is gone."""
    message = str(error)
    match error:
        case PeerFailedError() | dist.DistBackendError() | dist.DistNetworkError():
            return True
        case ValueError():
            return any(sign in message for sign in _EVALUATE_WAITED)
        case RuntimeError():
            return says_lost_peer(message)
        case _:
            return False
