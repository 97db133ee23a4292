"""The areas of the extra tests, what decides which of them run, and what .ci/xeon installs."""

from __future__ import annotations

import ast
import os
import re
import runpy
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import CHECKOUT


@pytest.fixture
def areas(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of .ci/areas.py."""
    monkeypatch.chdir(CHECKOUT)
    return runpy.run_path(".ci/areas.py")


def test_every_area_is_declared(areas: dict[str, Any]) -> None:
    by_file = areas["areas_of_tests"]()
    assert set().union(*by_file.values()) == set(areas["AREAS"])


def test_every_path_exists(areas: dict[str, Any]) -> None:
    paths = [path for paths in areas["AREAS"].values() for path in paths]
    for path in (*paths, *areas["EVERYWHERE"]):
        assert (CHECKOUT / path).exists(), path


@pytest.mark.parametrize(
    ("file", "area"),
    [("docs/faq.md", "docs"), ("tests/locks/test_patches.py", "patches")],
)
def test_a_change_touches_its_area(areas: dict[str, Any], file: str, area: str) -> None:
    assert areas["touched"]([file]) == {area}


def test_a_change_of_the_core_touches_all(areas: dict[str, Any]) -> None:
    everything = set(areas["AREAS"])
    assert areas["touched"](["slurmft/core/config.py"]) == everything
    assert areas["touched"]([]) == set()
    assert areas["touched"](["slurmft/api.py"]) == set()


def test_packages_of_the_extra_xeon() -> None:
    """`.ci/xeon` installs what its tests, and what all tests have in common, import at once."""
    script = (CHECKOUT / ".ci/xeon").read_text()
    (names,) = re.findall(r'"\.\[xeon\]" (.+)', script)
    installed = with_requirements(["slurmft", *names.split()])
    files = [CHECKOUT / "tests/conftest.py"]
    files += [CHECKOUT / name for name in re.findall(r"tests/\S+\.py", script)]
    distributions = packages_distributions()
    missing = set()
    for module in imported_at_once(files):
        for name in distributions.get(module, ()):
            if canonicalize_name(name) not in installed:
                missing.add(name)
    assert not missing
    constraints = (CHECKOUT / "constraints-xeon.txt").read_text()
    for name in names.split():
        assert re.search(rf"^{name}==", constraints, re.MULTILINE), name


def test_lints_need_no_package_of_the_extra_tests() -> None:
    """CI checks types where the packages of `test-extra` may be absent: mypy is told of each."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    lines = project["project"]["dependencies"] + extras["test"] + extras["lint"]
    installed = with_requirements([Requirement(line).name for line in lines])
    told = project["tool"]["mypy"]["overrides"][0]["module"]
    distributions = packages_distributions()
    missing = set()
    for module in imported_anywhere(project["tool"]["mypy"]["files"]):
        homes = {canonicalize_name(name) for name in distributions.get(module, ())}
        if not homes & installed and f"{module}.*" not in told:
            missing.add(module)
    assert not missing


def imported_anywhere(paths: list[str]) -> set[str]:
    """The packages of others that these files and folders import, also within functions."""
    files = [CHECKOUT / path for path in paths if path.endswith(".py")]
    for path in paths:
        # Links are followed, as mypy does.
        for folder, _, names in os.walk(CHECKOUT / path, followlinks=True):
            files += [Path(folder, name) for name in names if name.endswith(".py")]
    packages: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                packages.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                packages.add(node.module.split(".")[0])
    ours = {path.name for path in CHECKOUT.iterdir()}
    ours.update(file.stem for file in files)
    ours.update(file.parent.name for file in files)
    return packages - sys.stdlib_module_names - ours


def with_requirements(names: list[str]) -> set[str]:
    """Packages, and all that they require, as far as they are installed here."""
    found: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name in found:
            continue
        found.add(name)
        try:
            requirements = map(Requirement, requires(name) or ())
        except PackageNotFoundError:
            continue
        for each in requirements:
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                names.append(each.name)
    return found


def imported_at_once(files: list[Path]) -> set[str]:
    """The packages that modules of tests, and those that these import, import at their top."""
    packages: set[str] = set()
    seen: set[Path] = set()
    while files:
        file = files.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        for node in ast.parse(file.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                parts = name.split(".")
                packages.add(parts[0])
                if parts[0] == "tests":
                    # A module, or a name of one.
                    for end in (len(parts), len(parts) - 1):
                        path = CHECKOUT.joinpath(*parts[:end])
                        files += [path.with_suffix(".py"), path / "__init__.py"]
    return packages
