"""What the ranks of `test_dist.py` do; started by torchrun with three processes."""

from __future__ import annotations

import numpy as np

from slurmft import dist
from slurmft.dist import PeerFailedError, World
from slurmft.metrics import share_metrics


def check_collectives(world: World) -> None:
    assert world.sum([world.rank, 1.0]) == [3.0, 3.0]
    assert world.all_values(world.rank * 2.0) == [0.0, 2.0, 4.0]
    assert world.broadcast([0.1, 1e-300] if world.is_main else None, 2) == [0.1, 1e-300]


def check_gather(world: World) -> None:
    for sizes in ([4, 0, 3], [1, 1, 1], [0, 0, 5]):
        mine = np.arange(sizes[world.rank]) + 10 * world.rank
        whole = world.gather(mine, sizes)
        if world.is_main:
            expected = [10 * rank + i for rank, size in enumerate(sizes) for i in range(size)]
            assert whole is not None
            assert whole.tolist() == expected
        else:
            assert whole is None


def check_failures(world: World) -> None:
    """A failure on the main rank is everybody's, at once; the next collective still works."""

    def fail() -> dict[str, float]:
        raise ValueError("no such metric")

    for call in (
        lambda: world.on_main(fail),
        lambda: share_metrics(world, ["accuracy"], fail, lambda phase: None),
    ):
        try:
            call()
        except ValueError:
            assert world.is_main
        except PeerFailedError:
            assert not world.is_main
        else:
            raise AssertionError("nobody noticed")
    assert world.sum([1.0]) == [3.0]


def check_metrics(world: World) -> None:
    laps: list[str] = []
    found = share_metrics(world, ["a", "b"], lambda: {"a": 1 / 3, "b": float("nan")}, laps.append)
    assert found["a"] == 1 / 3
    assert np.isnan(found["b"])
    assert laps == ["metric", "broadcast"]


if __name__ == "__main__":
    world = dist.init("gloo")
    check_collectives(world)
    check_gather(world)
    check_failures(world)
    check_metrics(world)
    dist.leave()
    print(f"rank {world.rank} done\n", end="")  # in one write: torchrun starts python -u
