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
        return State({"ranks": self._world.gather_objects(rng_state(self._world.device))})

    def load(self, state: State) -> None:
        """Sets this rank's generators. Ranks that the run did not have before keep theirs."""
        ranks = state.values["ranks"]
        if self._world.rank < len(ranks):
            set_rng_state(ranks[self._world.rank], self._world.device)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of every generator of this process, as JSON can hold it."""
    state = {
        "python": _python_state(),
        "numpy": _numpy_state(),
        "torch": _encode(torch.get_rng_state().numpy()),
    }
    if device.type != "cpu":
        device_state = torch.get_device_module(device).get_rng_state(device)
        state[device.type] = _encode(device_state.numpy())
    return state


def _python_state() -> list[Any]:
    version, numbers, gauss = random.getstate()
    # The last of them is a place, which needs more than the 32 bits of the others.
    return [version, _encode(np.asarray(numbers, dtype=np.uint64)), gauss]


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
    np.random.set_state((name, _decode(keys, np.uint32), *rest))
    torch.set_rng_state(torch.from_numpy(_decode(state["torch"], np.uint8)))
    if device.type in state:
        device_state = torch.from_numpy(_decode(state[device.type], np.uint8))
        torch.get_device_module(device).set_rng_state(device_state, device)


def _encode(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _decode(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
