"""What killed a process: the kernel's counters are asked, and one is really made to count."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.node import hardware
from slurmft.node.memory_kills import MemoryKills, killed
from tests.support import PATIENCE_S
from tests.support.control_group import limited

LIMIT = "1.0 GiB"
USES_TOO_MUCH = """
import subprocess, sys
from slurmft.node.memory_kills import MemoryKills, killed
before = MemoryKills.now()
code = subprocess.call([sys.executable, "-c", "bytearray(3 << 30)"])
print(killed("it", -code, before, "log: x").message)
before = MemoryKills.now()
code = subprocess.call(["sh", "-c", "kill -9 $$"])
print(killed("it", -code, before, "log: x").message)
"""


def machine(
    root: Path, version: int, in_group: int | None, on_machine: int | None
) -> Path:
    """A root folder with the kernel's files of a process in the group /job."""
    folder = root / "sys/fs/cgroup" / ("job" if version == 2 else "memory/job")
    folder.mkdir(parents=True, exist_ok=True)
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    line = "0::/job" if version == 2 else "4:memory:/job"
    (root / "proc/self/cgroup").write_text(f"{line}\n")
    (root / "proc/meminfo").write_text("MemTotal: 67108864 kB\n")
    if in_group is not None:
        counter = "memory.events" if version == 2 else "memory.oom_control"
        (folder / counter).write_text(f"low 0\noom 9\noom_kill {in_group}\n")
    if on_machine is not None:
        (root / "proc/vmstat").write_text(f"pgfault 7\noom_kill {on_machine}\n")
    return root


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("before", "after", "ran_out"),
    [
        ((3, 5), (4, 6), True),
        ((3, 5), (3, 5), False),
        (
            (3, 5),
            (3, 6),
            None,
        ),  # in another group, which may be a container of this job
        ((None, 5), (None, 5), False),
        ((None, 5), (None, 6), None),
        ((None, None), (None, None), None),
        ((3, None), (4, None), True),
        ((3, None), (3, None), None),
    ],
)
def test_counters(
    tmp_path: Path,
    version: int,
    before: tuple[int | None, int | None],
    after: tuple[int | None, int | None],
    ran_out: bool | None,
) -> None:
    then = MemoryKills.now(machine(tmp_path, version, *before))
    machine(tmp_path, version, *after)
    assert then.more(tmp_path) is ran_out


def test_words(tmp_path: Path) -> None:
    """Only what the kernel has counted is said."""
    before = MemoryKills.now(machine(tmp_path, 2, 0, 0))
    assert killed("it", signal.SIGKILL, before, "log", tmp_path).message == (
        "it was killed by SIGKILL"
    )
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text(str(3 * 2**29))
    machine(tmp_path, 2, 1, 1)
    error = killed("it", signal.SIGKILL, before, "log: rank-000.log", tmp_path)
    assert error.message == (
        "it was killed by SIGKILL: the kernel reports that memory ran out (limit: 1.5 GiB)"
    )
    assert error.hint is not None
    assert "smaller batches" in error.hint
    assert error.hint.endswith("log: rank-000.log")
    assert killed("it", signal.SIGSEGV, before, "log", tmp_path).message == (
        "it was killed by SIGSEGV"
    )
    # Python has no name for those of real time.
    assert killed("it", 40, before, "log", tmp_path).message == (
        "it was killed by signal 40"
    )


@pytest.mark.processes
def test_kernel_that_ends_a_process() -> None:
    """Beside one that a signal ends."""
    with limited(2**30) as enter:
        done = subprocess.run(
            [*enter, sys.executable, "-c", USES_TOO_MUCH],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.stdout.splitlines() == [
        f"it was killed by SIGKILL: the kernel reports that memory ran out (limit: {LIMIT})",
        "it was killed by SIGKILL",
    ], done.stderr


def test_free_memory_counts_what_the_kernel_gives_back(tmp_path: Path) -> None:
    """Pages of tmpfs and of shared memory, which are among those of "file", stay."""
    stat = "anon 300\nfile 900\nshmem 600\nactive_file 200\ninactive_file 100\n"
    for version in (1, 2):
        root = machine(tmp_path / str(version), version, in_group=0, on_machine=None)
        files = {"memory.max": "2000", "memory.current": "1200", "memory.stat": stat}
        folder = root / "sys/fs/cgroup/job"
        if version == 1:
            folder = root / "sys/fs/cgroup/memory/job"
            # Without "total_" it is of the group itself, without those in it.
            of_itself = "cache 0\nshmem 0\nactive_file 7\ninactive_file 7\n"
            sums = "".join(f"total_{line}\n" for line in stat.splitlines())
            files = {
                "memory.limit_in_bytes": "2000",
                "memory.usage_in_bytes": "1200",
                "memory.stat": of_itself + sums.replace("total_file", "total_cache"),
            }
        for name, text in files.items():
            (folder / name).write_text(text)
        assert hardware.free_memory_bytes(root) == 800 + 300
