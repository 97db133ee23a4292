"""Whether the ranks of a program have formed their process group, as the group's store shows.

A script that never initializes torch.distributed trains a copy on every rank, each on all the data.
Nothing fails then, whatever the library. The store of a process group is a server on the host of
rank 0, to which each rank keeps a connection: they are counted here, from outside of the program.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from slurmft.core.errors import SlurmftError
from slurmft.core.text import duration
from slurmft.node import connections

PATIENCE_S = 180
"""How long the ranks of a program may take to form their group."""
LOOK_EVERY_S = 1.0
# A program that ends sooner has trained nothing, and its group may not have been seen.
_SHORTEST_S = 10
_AGENT_SERVES = "TORCHELASTIC_USE_AGENT_STORE"
"""torchrun's variable: its agent serves the store, and not rank 0."""


class GroupWatch:
    """Watches the store of a process group; on the host of its rank 0."""

    def __init__(
        self,
        world_size: int,
        port: int,
        others: int = 0,
        tables: tuple[Path, ...] = connections.TABLES,
    ) -> None:
        """
        Args:
            others: connections to the store that are no rank's.
        """
        self._world_size = world_size
        self._port = port
        self._others = others
        self._tables = tables
        self._began_at = time.monotonic()
        self._most = 0
        """The most ranks that were connected at a time."""

    @classmethod
    def of_rank(cls, rank: int, environment: Mapping[str, str]) -> "GroupWatch | None":
        """Returns the watch of a job's process group; None on ranks that have nothing to watch."""
        world_size = int(environment.get("WORLD_SIZE", "1"))
        port = environment.get("MASTER_PORT", "")
        if rank != 0 or world_size == 1 or not port.isdigit():
            return None
        # torchrun's agent, which serves the store, is a client of it, too.
        others = int(environment.get(_AGENT_SERVES) == "True")
        return cls(world_size, int(port), others)

    @property
    def seconds(self) -> float:
        """How long it has watched."""
        return time.monotonic() - self._began_at

    def look(self) -> bool:
        """Looks once; returns whether all ranks have been connected at a time."""
        if self._most < self._world_size:
            self._most = max(self._most, self._connected())
        return self._most >= self._world_size

    def problem(self, at_end: bool = False) -> SlurmftError | None:
        """Returns what is wrong with the group; None: it has formed, or may still form.

        Args:
            at_end: the program has ended.
        """
        patience_s = PATIENCE_S
        if at_end:
            patience_s = _SHORTEST_S
        if self.look() or self.seconds < patience_s:
            return None
        return SlurmftError(
            f"after {duration(self.seconds)}, {self._most} of {self._world_size} ranks have joined "
            "a process group: each may train a copy of its own, on all the data",
            "call torch.distributed.init_process_group(), or let the library do so; --per process "
            "is for processes that do not communicate",
        )

    def _connected(self) -> int:
        """Counts the ranks that are connected to the store."""
        count = connections.clients_of(self._port, self._tables)
        return max(0, count - self._others)
