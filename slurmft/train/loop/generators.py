"""The generators of random numbers, as a part of the state of a run."""

import base64
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from slurmft.job.process_group import World
from slurmft.train.loop.state import State


class Generators:
    """Every generator of random numbers that a rank draws from: Python's, numpy's and torch's."""

    def __init__(self, world: World) -> None:
        self._world = world

    def state(self) -> State:
        """Returns the generators of all ranks, in the order of the ranks."""
        own_state = rng_state(self._world.device)
        return State({"ranks": self._world.gather_objects(own_state)})

    def load(self, state: State) -> None:
        """Sets this rank's generators. Ranks that the run did not have before keep theirs."""
        ranks = state.values["ranks"]
        rank = self._world.rank
        if rank < len(ranks):
            set_rng_state(ranks[rank], self._world.device)


@contextlib.contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Sets every generator, at the end of the block, to the state that it has now."""
    state = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of every generator of this process, as JSON can hold it."""
    # The rest: the place among the keys, whether a normal draw is left over, and its value.
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type != "cpu":
        module = torch.get_device_module(device)
        state[device.type] = _encode(module.get_rng_state(device))
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Sets every generator to a state that `rng_state` returned."""
    # JSON made lists of tuples, and Python takes tuples alone.
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_decode(state["torch"]))
    # A checkpoint of a run on other hardware has no state of this device.
    if device.type in state:
        module = torch.get_device_module(device)
        module.set_rng_state(_decode(state[device.type]), device)


def _encode(numbers: torch.Tensor) -> str:
    """Returns bytes as text: torch's state has 5,056, which take three times the room as a list."""
    return base64.b64encode(numbers.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    # A copy that can be written to: torch warns of memory that cannot.
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
