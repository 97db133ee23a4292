"""torch's own stores, as a stranger connects to them, or as what a job's are compared with."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from tests.support import PATIENCE_S


def plain_store(port: int = 0, serves: bool = True) -> Any:
    """Returns a store without seals on this machine; without a port, one that is free."""
    return TCPStore(
        "127.0.0.1", port, None, serves, timedelta(seconds=PATIENCE_S), False
    )
