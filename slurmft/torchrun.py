"""torchrun that lives through stop signals and relays them: `python -m slurmft.torchrun ...`.

The stock agent kills its ranks on SIGTERM, and dies of SIGUSR2. This one hands both on to the
ranks, which agree on a step, save, and end by themselves. SIGHUP still ends it, and its ranks.
"""

from __future__ import annotations

import contextlib
import glob
import os
import sys

from slurmft import signals, stamps, store


def relay(signum: int, sender: int) -> None:
    """Sends a stop signal on to the ranks, and notes it for those yet to start."""
    os.environ[signals.STOPPING] = str(signum)
    for pid in children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signals.RELAYED)


def children() -> list[int]:
    """The processes that this one has started."""
    found: list[int] = []
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(path) as file:
            found += map(int, file.read().split())
    return found


def main(argv: list[str]) -> None:
    signals.block()
    stamps.stamp_output("stdout", "stderr")  # before torch's logging takes hold of them
    signals.listen(relay)
    from torch.distributed.run import main as torchrun

    store.bind()
    torchrun(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
