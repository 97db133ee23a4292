"""Stop signals that are blocked, and what the processes of a rank do with them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_RANK = """
import multiprocessing, signal, subprocess, sys
from slurmft.job.process import receive_signals

def work(number):
    return number + 1

if __name__ == "__main__":
    receive_signals()
    {code}
    print("ended")
"""

_POOL = """
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        assert pool.map(work, [1, 2]) == [2, 3]
"""
_CHILD = """
    child = subprocess.Popen(["sleep", "600"])
    child.terminate()
    assert child.wait() == -signal.SIGKILL
"""
_HANDLES = """
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); "
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]); "
        "print('here', flush=True); signal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    child.terminate()
    assert child.wait() == 3
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "code",
    [
        *(_POOL.format(method=name) for name in ("fork", "spawn", "forkserver")),
        _CHILD,
        _HANDLES,
    ],
    ids=["fork", "spawn", "forkserver", "subprocess", "handles"],
)
def test_children_of_a_rank_can_be_terminated(code: str, tmp_path: object) -> None:
    """They inherit the blocked SIGTERM: a pool waited for its workers for ever."""
    script = f"{tmp_path}/rank.py"
    with open(script, "w") as file:
        file.write(_RANK.format(code=code.strip()))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
