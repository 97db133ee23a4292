"""Packages import only what stands below them, modules nothing in circles; functions are short."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.support import CHECKOUT

PACKAGE = CHECKOUT / "slurmft"
MOST_LINES = 60
"""Of a function, with its docstring."""


@pytest.mark.processes
def test_import_contracts() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [lint], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


def test_no_module_imports_one_that_imports_it() -> None:
    """Also imports within functions count, which hide a circle and do not open it; those for type
    checks alone do not."""
    modules = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = file
    imports = {name: imported(file, modules) for name, file in modules.items()}
    # Raises CycleError, which names the modules of a circle.
    graphlib.TopologicalSorter(imports).prepare()


def imported(file: Path, modules: Collection[str]) -> set[str]:
    """The modules among these that a file imports."""
    names = []
    for node in executed(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                # A module, or a name of one.
                full_name = f"{node.module}.{alias.name}"
                names.append(full_name if full_name in modules else str(node.module))
    return {name for name in names if name in modules}


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a module, without those that are there for type checkers."""
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(
            child.test
        )
        if not is_for_types:
            yield child
            yield from executed(child)


def test_functions_are_short() -> None:
    too_long = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES:
                    too_long.append(f"{file}: {node.name} has {lines} lines")
    assert not too_long
