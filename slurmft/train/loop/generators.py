"""The generators of random numbers, as a part of the state of a run."""

import base64
import random
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


def rng_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of every generator of this process, as JSON can hold it."""
    state = {
        "python": _python_state(),
        "numpy": _numpy_state(),
        "torch": _encode(torch.get_rng_state().numpy()),
    }
    if device.type != "cpu":
        module = torch.get_device_module(device)
        device_state = module.get_rng_state(device)
        state[device.type] = _encode(device_state.numpy())
    return state


def _python_state() -> list[Any]:
    version, numbers, gauss = random.getstate()
    # 624 words of 32 bits, then the place of the next one.
    array = np.asarray(numbers, dtype=np.uint64)
    return [version, _encode(array), gauss]


def _numpy_state() -> list[Any]:
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return [name, _encode(keys), *rest]


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Sets every generator to a state that `rng_state` returned."""
    version, text, gauss = state["python"]
    numbers = tuple(_decode(text, np.uint64).tolist())
    random.setstate((version, numbers, gauss))
    name, keys, *rest = state["numpy"]
    # The types are those that `_encode` got: its text has none.
    np.random.set_state((name, _decode(keys, np.uint32), *rest))
    cpu_state = torch.from_numpy(_decode(state["torch"], np.uint8))
    torch.set_rng_state(cpu_state)
    # A checkpoint of a run on other hardware has no state of this device.
    if device.type in state:
        device_state = torch.from_numpy(_decode(state[device.type], np.uint8))
        torch.get_device_module(device).set_rng_state(device_state, device)


def _encode(array: np.ndarray) -> str:
    """Returns the bytes of an array as text, for JSON."""
    return base64.b64encode(array.tobytes()).decode()


def _decode(text: str, dtype: Any) -> np.ndarray:
    array = np.frombuffer(base64.b64decode(text), dtype=dtype)
    return array.copy()  # torch warns of memory that it could not write to
