"""Commands of the login node start at once: their modules import nothing that takes long."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from slurmft.core import plugins
from tests.support import PATIENCE_S

pytestmark = pytest.mark.processes

HEAVY = (
    "torch", "transformers", "accelerate", "datasets", "evaluate", "sklearn", "scipy", "pandas",
    "pyarrow", "matplotlib", "numpy", "submitit", "huggingface_hub", "tokenizers", "shtab",
)  # fmt: skip
"""Packages of which each takes longer than a whole `slurmft status`."""
COMPUTES = {"plan": {"numpy"}}
"""Commands that need one of these for all that they do."""
ASKED_OFTEN = ("status", "list")
"""Commands that a user types again and again, and a script calls in a loop."""
WHERE_ASKED = (
    "slurmft.cluster.cost",
    "slurmft.node.hardware",
    "slurmft.node.rendezvous",
    "ctypes",
    "importlib.metadata",
)
"""Modules that they import in the functions which need them, if at all."""

CODE = """
import json, sys
from slurmft.core import plugins
entries = plugins.entries(plugins.COMMANDS)
order = json.loads(sys.argv[1])
watched = set(json.loads(sys.argv[2]))
earlier = set()
for name in order:
    entries[name].load()
    present = watched & sys.modules.keys()
    print(json.dumps([name, sorted(present - earlier)]))
    earlier = present
"""


def test_commands_import_nothing_heavy() -> None:
    declared = plugins.entries(plugins.COMMANDS)
    # In one interpreter, to take a second and not twenty. A module counts for the first command
    # that imports it: those that may import the least come first, and those that may most, last.
    others = declared.keys() - set(ASKED_OFTEN) - COMPUTES.keys()
    order = [*ASKED_OFTEN, *sorted(others), *COMPUTES]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            CODE,
            json.dumps(order),
            json.dumps([*HEAVY, *WHERE_ASKED]),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    imports = {}
    for line in done.stdout.splitlines():
        name, modules = json.loads(line)
        imports[name] = set(modules)
    assert list(imports) == order
    for name in ASKED_OFTEN:
        assert imports[name] == set(), name
    for name, modules in imports.items():
        assert modules & set(HEAVY) == COMPUTES.get(name, set()), name


def test_a_dry_run_imports_no_metadata_of_packages() -> None:
    """`importlib.metadata` takes as long as the interpreter itself."""
    command = ("-m", "slurmft", "submit", "--cluster", "local", "--dry-run")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "slurmft.cluster.submit" in imported
    assert not imported & {"importlib.metadata", "tempfile", "zipfile"}
