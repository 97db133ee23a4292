"""Which areas of the extra tests a change touches: `python3 .ci/areas.py` prints them with commas.

The change is what lies between the last commit that passed here and this one. Where no commit has
passed yet there is nothing to compare with: no area is printed, and a line on stderr says so.
`python3 .ci/areas.py passed` notes that this commit has passed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EVERYWHERE = (
    "pyproject.toml",
    "constraints.txt",
    ".ci/",
    "slurmft/core/",
    "tests/conftest.py",
    "tests/support/",
)
"""A change of one of these touches every area."""

AREAS = {
    "browser": ("slurmft/plugins/studies/",),
    "caches": (
        "slurmft/train/login/",
        "slurmft/train/token_cache.py",
        "slurmft/runs/",
        "slurmft/locks/",
    ),
    "containers": (
        "slurmft/cluster/container.py",
        "slurmft/node/container.py",
        "slurmft/cluster/slurm/",
    ),
    "docs": ("docs/", "README.md", "mkdocs.yml", "slurmft/cli/", "results/benchmarks/"),
    "environments": ("slurmft/programs/", "slurmft/plugins/stage_env/"),
    "faults": (
        "slurmft/cluster/",
        "slurmft/job/",
        "slurmft/node/",
        "slurmft/runs/",
        "slurmft/train/loop/",
    ),
    "integrations": (
        "slurmft/plugins/integrations/",
        "slurmft/job/",
        "slurmft/programs/",
    ),
    "kubernetes": ("slurmft/plugins/kubernetes/",),
    "latex": ("slurmft/plugins/studies/report/",),
    "models": ("slurmft/train/engine/",),
    "mpi": (
        "slurmft/plugins/mpirun/",
        "slurmft/node/ccl.py",
        "slurmft/node/collectives.py",
        "slurmft/node/rendezvous.py",
        "slurmft/node/backend_probe.py",
    ),
    "notify": ("slurmft/plugins/notify/",),
    "patches": ("patches/",),
    "programs": ("slurmft/programs/", "slurmft/job/", "slurmft/cluster/slurm/"),
    "remote": ("slurmft/plugins/remote/",),
    "sbatch": ("sbatch/", "slurmft/shipped/", "slurmft/train/commands/"),
    "stage_env": ("slurmft/plugins/stage_env/",),
    "studies": ("slurmft/plugins/studies/",),
    "trackers": ("slurmft/plugins/trackers/",),
    "training": ("slurmft/train/",),
    "versions": ("slurmft/locks/", "patches/"),
    "wheel": ("slurmft/__init__.py", "slurmft/shipped/", "README.md"),
}
"""Area -> paths whose change it tests; with the files of its own tests, which name it."""

PASSED = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "slurmft/ci-passed")


def main(words: list[str]) -> None:
    if words == ["passed"]:
        note_passed()
    else:
        files = changed_files()
        if files is None:
            print(
                "no earlier pass is known here; every area: bash .ci/run all",
                file=sys.stderr,
            )
        print(",".join(sorted(touched(files or []))))


def touched(files: list[str]) -> set[str]:
    """Areas that a change of these files touches."""
    if any(file.startswith(EVERYWHERE) for file in files):
        return set(AREAS)
    tests = areas_of_tests()
    areas = {
        area for area, paths in AREAS.items() for f in files if f.startswith(paths)
    }
    return areas.union(*(tests.get(file, set()) for file in files))


def areas_of_tests() -> dict[str, set[str]]:
    """Areas that each file of tests names in its marks."""
    areas: dict[str, set[str]] = {}
    for file in sorted(Path("tests").rglob("test_*.py")):
        named = re.findall(r"mark\.extra\(\"([\w-]+)\"\)", file.read_text())
        areas[str(file)] = set(named)
    return areas


def changed_files() -> list[str] | None:
    """Files that differ from the last commit that passed; None if there is none in the history."""
    file = PASSED.expanduser()
    if not file.exists():
        return None
    commit = file.read_text().strip()
    diff = git("diff", "--name-only", "--no-renames", commit, "HEAD")
    return None if diff is None else diff.splitlines()


def note_passed() -> None:
    file = PASSED.expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(git("rev-parse", "HEAD") or "")


def git(*words: str) -> str | None:
    """What a git command prints; None if it fails."""
    done = subprocess.run(
        ["git", *words], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    main(sys.argv[1:])
