"""Each dangerous act has its place: what could execute, follow or delete something that another
user has made occurs in the modules that guard it, and nowhere else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurmft

_ROOT = Path(slurmft.__file__).parent

# Act -> the calls and names that carry it out, and the modules that may. A module that is missing
# here has to ask one of these.
DOORS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unpickle": (
        ("pickle", "torch.load", "dill", "marshal", "joblib.load"),
        (),
    ),
    "unpack": (
        ("tarfile", "zipfile", "shutil.unpack_archive"),
        ("programs/checkpoints.py",),  # looks whether a file is whole
    ),
    "execute": (
        ("exec()", "eval()", "runpy.run_path", "runpy.run_module"),
        ("plugins/integrations/__main__.py",),  # the script that the user names
    ),
    "delete": (
        ("rmtree", "unlink", "rmdir", "os.remove", "os.removedirs", "os.unlink"),
        (
            "core/removal.py",
            "plugins/stage_env/pack.py",
            "plugins/stage_env/unpack.py",
        ),
    ),
    "link": (
        ("os.link", "hardlink_to"),
        ("train/token_cache.py",),
    ),
}


def _uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields the dotted names that a module uses or imports, and the plain names that it calls as
    "name()", with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        if isinstance(node, ast.ImportFrom):
            yield str(node.module), node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node), node.lineno
            yield node.attr, node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield f"{node.func.id}()", node.lineno


@pytest.mark.parametrize("act", DOORS)
def test_act_occurs_in_the_modules_that_guard_it_alone(act: str) -> None:
    names, modules = DOORS[act]
    elsewhere = []
    for path in sorted(_ROOT.rglob("*.py")):
        module = str(path.relative_to(_ROOT))
        if module in modules:
            continue
        for name, line in _uses(ast.parse(path.read_text())):
            if name in names:
                elsewhere.append(f"{module}:{line}: {name}")
    assert not elsewhere
