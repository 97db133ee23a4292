"""Another account's process, which writes into the stores of a job while it runs:
`python -m tests.support.stranger RUNS_DIR PHASE BOMB SEED`. Prints how often it has written.

It has torch's own client, and finds ports as root does here; others scan for them. Phases:
rendezvous (from the first store on), ranks (from the second on), training (from the first step on).
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import random
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch._C._distributed_c10d import TCPStore

WRITES = 1000
_LONGEST_S = 90
_PATIENCE = timedelta(milliseconds=300)


class Bomb:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def ports_of(runs_dir: str) -> set[int]:
    """Ports on which the processes of a job listen."""
    ports: set[int] = set()
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid:
            with contextlib.suppress(psutil.Error):
                command = psutil.Process(connection.pid).cmdline()
                if any(word.startswith(runs_dir) for word in command):
                    ports.add(connection.laddr.port)
    return ports


def write(store: Any, draw: random.Random, bomb: bytes) -> int:
    """Writes into each key of a store, once; returns how often."""
    keys = store.list_keys()
    values = [store.get(key) for key in keys if store.check([key])]
    for key in keys:
        value = draw.choice(
            [bomb, base64.b64encode(bomb), b"", b"1", draw.randbytes(60), *values]
        )
        match draw.randrange(8):
            case 1:
                store.append(key, value)
            case 2:
                store.compare_set(key, draw.choice([b"", *values]), value)
            case _:
                store.set(key, value)
    return len(keys)


def connect(port: int, stores: dict[int, Any]) -> None:
    """Adds the client of a port, if a store listens there."""
    with contextlib.suppress(RuntimeError):
        stores[port] = TCPStore("127.0.0.1", port, None, False, _PATIENCE)


def main(runs_dir: str, phase: str, bomb_path: str, seed: str) -> None:
    draw = random.Random(int(seed))
    bomb = pickle.dumps(Bomb(bomb_path))
    stores: dict[int, Any] = {}
    tried: set[int] = set()
    written = 0
    deadline = time.monotonic() + _LONGEST_S
    while written < WRITES and time.monotonic() < deadline:
        time.sleep(0.02)
        ports = ports_of(runs_dir)
        if not ports and written:
            break
        for port in ports - tried:
            tried.add(port)
            # Those that are no store take a second to say so: a training may be over by then.
            threading.Thread(target=connect, args=(port, stores), daemon=True).start()
        if phase == "ranks" and len(stores) < 2:
            continue
        if phase == "training":
            records = list(Path(runs_dir).glob("*/records.jsonl"))
            if not any('"event": "step"' in path.read_text() for path in records):
                continue
            phase = "now"
        for port in ports & set(stores):
            with contextlib.suppress(RuntimeError):
                written += write(stores[port], draw, bomb)
    print(written)


if __name__ == "__main__":
    main(*sys.argv[1:])
