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
from slurmft.job import devices
from slurmft.job.backend import agree
from slurmft.job.process import LOST_PEER
from slurmft.node import torchrun

_TIMEOUT = timedelta(minutes=30)
_CONTROL_TIMEOUT = timedelta(days=2)
"""Ranks may wait long for the main one, which reads data; real hangs are the watchdog's to find."""

_EVALUATE_WAITED = ("Expected to find locked file", "Cannot acquire lock on cached file")
"""evaluate's messages about a rank that has not written its file, for whatever reason."""


class PeerFailedError(SlurmftError):
    """Another rank failed: that one's error is the one to read."""


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
    warning: str | None = None
    """What the user should know of the backend."""
    owned: bool = True
    """The process group was set up here, not by the program."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def on_main(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, which the main rank does while the others wait; on every rank.

        What it raises is raised on the main rank; on the others PeerFailedError, with its message.
        Nobody hangs.
        """
        value, error = _tried(self.is_main, work)
        value, message = self.share_object((value, error and _in_words(error)))
        if error is not None:
            raise error
        if message:
            raise PeerFailedError(f"rank 0 failed: {message}")
        return value

    def on_some(self, chosen: bool, work: Callable[[], Any]) -> None:
        """Runs `work` on the ranks that are chosen, while the others wait.

        What it raises on one of them is raised there; on the others PeerFailedError, with its
        message. Nobody hangs.
        """
        _, error = _tried(chosen, work)
        messages = self.all_objects(error and _in_words(error))
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message:
                raise PeerFailedError(f"rank {rank} failed: {message}")

    def sum(self, values: Sequence[float] | torch.Tensor) -> list[float]:
        """Sums over all ranks, element by element, as doubles."""
        tensor = torch.as_tensor(values, dtype=torch.float64).to(self.device, copy=True)
        dist.all_reduce(tensor)
        return [float(v) for v in tensor.tolist()]

    def all_values(self, value: float) -> list[float]:
        """One value of every rank, by rank."""
        return self.sum([value if rank == self.rank else 0.0 for rank in range(self.size)])

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on the main rank; an empty list elsewhere."""
        values: list[Any] = [None] * self.size if self.is_main else []
        dist.gather_object(value, values if self.is_main else None, dst=0, group=self.control)
        return values

    def all_objects(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share_object(self, value: Any, source: int = 0) -> Any:
        """One rank's value, on every rank. Others pass anything."""
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.control)
        return box[0]

    def share_tensors(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The main rank's CPU tensors, on every rank, bit by bit. Others pass anything."""
        layout = self.share_object({k: (tuple(t.shape), t.dtype) for k, t in tensors.items()})
        shared = {}
        for name, (shape, dtype) in layout.items():
            tensor = tensors[name] if self.is_main else torch.empty(shape, dtype=dtype)
            flat = tensor.contiguous().reshape(-1)
            if flat.numel():
                dist.broadcast(flat.view(torch.uint8), src=0, group=self.control)
            shared[name] = flat.reshape(shape)
        return shared


def _tried(is_here: bool, work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What `work` returns or raises, if this rank does it."""
    try:
        return (work() if is_here else None), None
    except Exception as error:
        return None, error


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def leave() -> None:
    """Leaves the process group, after the last collective: a rank that just exits looks dead."""
    dist.destroy_process_group()


def init(backend: str) -> World:
    """Sets up the process group of torchrun's ranks; one that the program has set up is used.
    Raises as `backend.choose`.

    Accelerate uses a process group that is there: so it works with ccl, too.
    """
    owned = not dist.is_initialized()
    name, warning = dist.get_backend() if not owned else "", None
    if owned:
        torchrun.bind_stores()
        store, rank, size = next(rendezvous("env://", timeout=_TIMEOUT))
        name, warning = agree(backend, store, rank, size)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = devices.take(local_rank) if name in ("nccl", "xccl") else torch.device("cpu")
    if owned:
        dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        device=device,
        backend=name,
        warning=warning,
        control=dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT),
        owned=owned,
    )


def is_secondary(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, (PeerFailedError, dist.DistBackendError, dist.DistNetworkError)):
        return True
    if isinstance(error, ValueError) and any(w in str(error) for w in _EVALUATE_WAITED):
        return True
    return isinstance(error, RuntimeError) and any(s in str(error).lower() for s in LOST_PEER)
