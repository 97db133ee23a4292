"""Which files does a job go through, from the command on the login node to the first step of its
ranks? Those whose functions are called: on the login node, in the batch script, in the task of the
node, in the wrapper of torchrun, in a rank. What imports alone call, such as decorators, is left
out. A Slurm that is none (tests/support/fake_slurm) starts the job.

    python results/benchmarks/way_of_a_job.py [--built-in] [--tree TREE]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from harness import REPOSITORY, parser

PROGRAM = """\
import slurmft

with slurmft.attach() as job:
    job.step(1, total=1, loss=1.0, samples=1)
    job.result(loss=1.0)
"""
TRACER = '''\
"""Notes the files of slurmft whose functions are called, until a rank has done a step."""
import os, sys, threading

TOP, NOTES, HAS_STEPPED = os.environ["WAY_TOP"], os.environ["WAY_NOTES"], os.environ["WAY_STEPPED"]
PLACES = {"slurmft.node.torchrun": "torchrun", "slurmft.node.task": "task",
          "first_node.run()": "batch script"}
words = " ".join(sys.orig_argv)
place = next((place for text, place in PLACES.items() if text in words), None)
if "RANK" in os.environ:
    place = "rank"
elif sys.orig_argv[1:3] == ["-m", "slurmft"]:
    place = "login node"
noted = set()


def note(frame, event, argument):
    code = frame.f_code
    # Bodies of modules and classes are no functions: they lack the flag 1.
    if event != "call" or not code.co_filename.startswith(TOP) or not code.co_flags & 1:
        return
    if code.co_filename not in noted and not os.path.exists(HAS_STEPPED):
        above = frame
        while above is not None:
            if above.f_code.co_name == "<module>" and above.f_globals.get("__name__") != "__main__":
                return
            above = above.f_back
        noted.add(code.co_filename)
        with open(NOTES, "a") as file:
            file.write(f"{place}\\t{code.co_filename}\\n")
    if place == "rank" and code.co_name in ("step", "begin_step"):
        open(HAS_STEPPED, "w").close()
        sys.setprofile(None)


if place:
    sys.setprofile(note)
    threading.setprofile(note)
'''
ORDER = ("login node", "batch script", "task", "torchrun", "rank")


def main() -> None:
    """Runs a job, and prints the files by place, and their lines."""
    command = parser(__doc__)
    command.add_argument(
        "--built-in", action="store_true", help="the training, not a script"
    )
    command.add_argument(
        "--tree", type=Path, default=REPOSITORY, help="another work tree"
    )
    arguments = command.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = traced(arguments.tree.resolve(), arguments.built_in, Path(folder))
    every: dict[str, int] = {}
    for place in ORDER:
        paths = files.get(place, set())
        lines = {
            path: len(Path(path).read_text().splitlines()) for path in sorted(paths)
        }
        print(f"{place}: {len(lines)} files, {sum(lines.values())} lines")
        for path, count in lines.items():
            print(f"  {os.path.relpath(path, arguments.tree)} {count}")
        every |= lines
    print(f"in all: {len(every)} files, {sum(every.values())} lines")


def traced(tree: Path, built_in: bool, folder: Path) -> dict[str, set[str]]:
    """Runs a job of the code in `tree`; returns place -> the files that it has gone through."""
    from tests.support.fake_slurm.cluster import FakeSlurm

    (folder / "sitecustomize.py").write_text(TRACER)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "site.toml").touch()  # that of this machine would change the way
    notes = folder / "notes"
    env = {
        "PYTHONPATH": f"{folder}{os.pathsep}{tree}",
        "WAY_TOP": f"{tree / 'slurmft'}{os.sep}",
        "WAY_NOTES": str(notes),
        "WAY_STEPPED": str(folder / "stepped"),
        "SLURMFT_SITE": str(folder / "site.toml"),
    }
    words = ["run"]
    end = ["--", "program.py"]
    if built_in:
        words = ["submit", "--max-steps", "1"]
        end = []
    words += [
        "--cluster",
        "slurm",
        "--nodes",
        "1",
        "--nproc-per-node",
        "1",
        "--runs-dir",
        "runs",
    ]
    with FakeSlurm(folder / "slurm") as slurm:
        argv = [sys.executable, "-m", "slurmft", *words, *end]
        slurm.run(argv, cwd=folder, env=env)
        slurm.wait_idle()
    places: dict[str, set[str]] = {}
    for line in notes.read_text().splitlines():
        place, _, path = line.partition("\t")
        places.setdefault(place, set()).add(path)
    return places


if __name__ == "__main__":
    main()
