"""A submission leaves the process around it as it was."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurmft
from tests.support import PATIENCE_S

_NOTEBOOK = """\
import logging, os, sys
from slurmft.cluster.submitit_logging import keeping_logging

# Each is closed by whoever shuts logging down.
log = logging.FileHandler(sys.argv[1], mode="w")
class Closing(logging.StreamHandler):
    def close(self):
        self.stream.close()
stream = open(os.devnull, "w")
logging.getLogger().addHandler(log)
logging.getLogger().addHandler(Closing(stream))
logging.warning("before")
with keeping_logging():
    import submitit
logging.warning("after")
assert not stream.closed
assert "SUBMITIT_LOG_LEVEL" not in os.environ
"""


@pytest.mark.processes
def test_log_files_of_a_notebook_go_on_after_a_submission(tmp_path: Path) -> None:
    """submitit configures logging at its import: all handlers of others were closed."""
    log = tmp_path / "mine.log"
    done = subprocess.run(
        [sys.executable, "-c", _NOTEBOOK, str(log)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "before\nafter\n"


def _imports(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        if any(name.partition(".")[0] == "submitit" for name in names):
            assert isinstance(node, ast.stmt)
            yield node


def test_every_import_of_submitit_keeps_logging() -> None:
    root = Path(slurmft.__file__).parent
    count = 0
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        # To parse all modules takes seconds.
        if "submitit" not in text:
            continue
        tree = ast.parse(text)
        keeping: list[ast.stmt] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.With):
                contexts = [ast.unparse(item) for item in node.items]
                if contexts == ["keeping_logging()"]:
                    keeping += node.body
        for statement in _imports(tree):
            count += 1
            assert statement in keeping, path
    assert count == 2
