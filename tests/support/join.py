"""Joins a process group as one rank: `python -m tests.support.join BACKEND`, for `test_backend.py`.

$GPUS is how many torch is to see here.
"""

from __future__ import annotations

import os
import sys

from slurmft.core.errors import SlurmftError
from slurmft.job import process_group
from tests.support.gpus import FakeGpus

if __name__ == "__main__":
    FakeGpus(int(os.environ["GPUS"])).install(setattr)
    try:
        world = process_group.init(sys.argv[1])
    except SlurmftError as error:
        print(f"error: {error}", flush=True)
        os._exit(error.code)
    assert world.sum([1.0]) == [2.0]
    print(world.backend, flush=True)
    process_group.leave()
    os._exit(0)
