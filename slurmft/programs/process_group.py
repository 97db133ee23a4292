"""Whether the ranks of a program have formed their process group, as the group's store shows.

A script that never initializes torch.distributed trains a copy on every rank, each on all the data.
Nothing fails then, whatever the library. The store of a process group is a server of rank 0, to
which each rank keeps a connection: they are counted here, from outside of the program.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurmft.core.errors import SlurmftError
from slurmft.core.text import duration

PATIENCE_S = 180
"""How long the ranks of a program may take to form their group."""
LOOK_EVERY_S = 1.0
# A program that ends sooner has trained nothing, and its group may not have been seen.
_SHORTEST_S = 10
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
"""State of a connection in the kernel's tables."""


class GroupWatch:
    """Watches the store of a process group; on the host of its rank 0."""

    def __init__(
        self, world_size: int, port: int, tables: tuple[Path, ...] = _TABLES
    ) -> None:
        self._world_size = world_size
        self._port = port
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
        return cls(world_size, int(port))

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
        """Counts the connections to the store."""
        ports = list(_ports_of_clients(self._tables))
        return ports.count(self._port)


def _ports_of_clients(tables: tuple[Path, ...]) -> Iterator[int]:
    """Yields the port of this host that each established connection leads to."""
    for table in tables:
        try:
            # Its first line names the columns.
            _, *lines = table.read_text().splitlines()
        except OSError:  # a kernel without IPv6
            continue
        for line in lines:
            _, local_address, _, state, *_ = line.split()
            if state == _ESTABLISHED:
                _, _, port = local_address.rpartition(":")
                yield int(port, 16)
