"""What do the seals of torch's stores cost a job of four nodes on a real Slurm, to its first sum?

    python -m tests.support.cluster up 4 && eval "$(python -m tests.support.cluster env)"
    python results/benchmarks/sealed_start.py [--rounds ROUNDS]

`slurmft run` in turn with seals, and with `--open-rendezvous`, by which the ranks' store has none
(that of torchrun's agents has them: see `sealed_store.py` for both). Printed are the medians of the
seconds from the first line of the batch script to the first all-reduce of the slowest rank, and of
those from the moment when all ranks have imported torch: processes on few cores are started at a
time that differs by more than any seal.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness import call, parser, save

NODES = 4
PROGRAM = """\
import os, time
import torch
import torch.distributed as dist
folder = os.path.dirname(__file__)
rank = os.environ["RANK"]
open(os.path.join(folder, "ready-" + rank), "w").close()
while sum(name.startswith("ready-") for name in os.listdir(folder)) < 4:
    time.sleep(0.005)
ready = time.time()
dist.init_process_group("gloo")
dist.all_reduce(torch.zeros(1))
end = time.time()
with open(os.path.join(folder, "times-" + rank), "w") as file:
    print(ready, end, file=file)
dist.barrier()
dist.destroy_process_group()
"""
CASES = {"sealed": (), "open": ("--open-rendezvous",)}


def main(rounds: int) -> None:
    whole: dict[str, list[float]] = {case: [] for case in CASES}
    meeting: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds + 1):
            # Each is first as often as the other.
            for case in sorted(CASES, reverse=bool(number % 2)):
                whole_s, meeting_s = started(Path(name) / f"{number}-{case}", case)
                print(
                    f"round {number} {case:7} {whole_s:6.2f} s {meeting_s:7.3f} s",
                    flush=True,
                )
                if number:  # the first round fills the disk cache
                    whole[case].append(whole_s)
                    meeting[case].append(meeting_s)
    results = {}
    for title, seconds in (("whole", whole), ("meeting", meeting)):
        pairs = zip(seconds["sealed"], seconds["open"], strict=True)
        more_s = [with_seals - without for with_seals, without in pairs]
        medians = {case: statistics.median(each) for case, each in seconds.items()}
        print(
            f"{title}: medians {medians}, pairs {1000 * statistics.median(more_s):.0f} ms more"
        )
        results[title] = {"seconds": seconds, "median_s": medians, "more_s": more_s}
    save("sealed_start", {"nodes": NODES, "rounds": rounds, **results})


def started(folder: Path, case: str) -> tuple[float, float]:
    """Returns the seconds of a job up to its first sum, from its first line on and from when all
    ranks are ready."""
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    start = folder / "start"
    words = [
        "run",
        "--follow",
        "--runs-dir",
        str(folder / "runs"),
        "--nodes",
        str(NODES),
    ]
    words += ["--time", "5", "--cpus-per-task", "1", "--snapshot", "none", *CASES[case]]
    words += ["--setup", f"date +%s.%N > {shlex.quote(str(start))}"]
    call(sys.executable, "-m", "slurmft", *words, "--", str(program), timeout_s=300)
    time.sleep(1)  # the nodes end their epilogs
    times = []
    for path in folder.glob("times-*"):
        times.append([float(word) for word in path.read_text().split()])
    assert len(times) == NODES, times
    end = max(ended for _, ended in times)
    return end - float(start.read_text()), end - max(ready for ready, _ in times)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=10)
    main(arguments.parse_args().rounds)
