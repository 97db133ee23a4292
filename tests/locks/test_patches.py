"""The patches for historic releases apply, are needed, and make metrics of several nodes right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import CHECKOUT, PATIENCE_S

pytestmark = pytest.mark.extra("patches")

PATCHES = CHECKOUT / "patches"
DATASETS = PATCHES / "datasets-2.0.0-lockf.patch"
EVALUATE = PATCHES / "evaluate-0.4.1-lockf.patch"
RELEASES = ("datasets==2.0.0", "evaluate==0.4.1")

PINS = (
    "dill==0.3.8",
    "fsspec==2023.10.0",
    "huggingface_hub==0.23.5",
    "multiprocess==0.70.16",
    "numpy==1.26.4",
    "pandas==2.2.3",
    "pyarrow==15.0.2",
)
"""What datasets 2.0.0 can be imported with; pyarrow 21, say, lacks a class that it derives from."""

METRIC = """
import importlib, json, multiprocessing, sys, threading
from datasets import Features, Value

library = importlib.import_module(sys.argv[1])
timeout = float(sys.argv[2])
folders = sys.argv[3:]  # one for each process


class Agreement(library.Metric):
    def _info(self):
        features = Features({"predictions": Value("int64"), "references": Value("int64")})
        return library.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        same = sum(int(x) == int(y) for x, y in zip(predictions, references))
        return {"same": same, "of": len(predictions)}


def samples(process):
    right, wrong = list(range(process + 1)), [99] * (9 - process)
    return {"predictions": right + wrong, "references": list(range(10))}


def work(process, barrier, results):
    metric = Agreement(
        cache_dir=folders[process],
        num_process=len(folders),
        process_id=process,
        experiment_id="job-1",
        timeout=timeout,
    )
    try:
        for _ in range(2):
            barrier.wait()
            result = metric.compute(**samples(process))
    except ValueError as error:
        result = f"ValueError: {error}"
        barrier.abort()
    except threading.BrokenBarrierError:
        result = "another process failed"
    results.put((process, result))


def several():
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(len(folders)), context.Queue()
    for process in range(len(folders)):
        context.Process(target=work, args=(process, barrier, results), daemon=True).start()
    return dict(results.get(timeout=150) for _ in folders)


def two_objects():
    # In one process, at the same time: they must not share a file.
    first, second = (Agreement(cache_dir=folders[0]) for _ in range(2))
    first.add_batch(**samples(0))
    second.add_batch(**samples(1))
    found = [first.compute(), second.compute()]

    first, second = (
        Agreement(cache_dir=folders[0], num_process=2, process_id=1, timeout=timeout)
        for _ in range(2)
    )
    held = first._create_cache_file()
    try:
        second._create_cache_file()
    except ValueError as error:
        found.append(f"ValueError: {error}")
    return found


print(json.dumps(several() if len(folders) > 1 else two_objects()))
"""
"""A metric in as many processes as it is given folders; with a single one, two metrics in one."""


def pip(*arguments: str, timeout_s: float) -> str | None:
    """Runs pip; why it failed."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-input"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"pip needs more than {timeout_s:g} s"
    return (done.stderr.strip() or "pip failed") if done.returncode else None


@pytest.fixture(scope="module")
def wheels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """The published wheels of both releases."""
    folder = tmp_path_factory.mktemp("wheels")
    problem = None if shutil.which("patch") else "there is no patch program"
    problem = problem or pip(
        "download",
        "--no-deps",
        "--retries=2",
        "--dest",
        str(folder),
        *RELEASES,
        timeout_s=100,
    )
    if problem and not request.config.getoption("--slurm"):
        pytest.skip(problem.splitlines()[-1])
    assert not problem, problem
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has what the two releases import."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60
    )
    made = folder / "bin" / "python"
    options = ("--only-binary=:all:", "--no-compile")
    problem = pip(
        "--python",
        str(made),
        "install",
        *options,
        *map(str, wheels),
        *PINS,
        timeout_s=240,
    )
    assert not problem, problem
    return made


def unpack(wheels: Sequence[Path], folder: Path) -> Path:
    """A site-packages folder with both releases."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def patch(site: Path, file: Path, *options: str) -> None:
    """Applies a patch as its head says, but accepts no fuzz."""
    command = ["patch", "-p1", "--fuzz=0", "--batch", *options]
    with file.open() as text:
        done = subprocess.run(
            command,
            stdin=text,
            cwd=site,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "offset" not in done.stdout


def compute(
    python: Path, site: Path, library: str, timeout_s: float, *folders: Path
) -> Any:
    done = subprocess.run(
        [python, "-c", METRIC, library, f"{timeout_s}", *folders],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=os.environ | {"PYTHONPATH": str(site), "HF_HOME": str(site / "hf")},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def on_both_nodes(two_nodes: tuple[Path, Path], name: str) -> list[Path]:
    """A cache folder for each of four processes, two a node."""
    return [node / name for node in two_nodes for _ in range(2)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("file", [DATASETS, EVALUATE], ids=lambda file: file.stem)
def test_apply_and_undo(wheels: list[Path], tmp_path: Path, file: Path) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}

    site = unpack(wheels, tmp_path)
    before = contents()
    patch(site, file)
    changed = {
        path: text for path, text in contents().items() if before.get(path) != text
    }
    assert changed
    for path, text in changed.items():
        compile(text, path, "exec")
    patch(site, file, "--reverse")
    assert contents() == before


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("patches", "free"),
    [
        pytest.param(
            [], 2, id="no patch: process 0 cannot see the locks of the other node"
        ),
        pytest.param([DATASETS], 0, id="one patch: process 0 gives its own lock away"),
    ],
)
def test_needed(
    python: Path,
    wheels: list[Path],
    two_nodes: tuple[Path, Path],
    tmp_path: Path,
    patches: list[Path],
    free: int,
) -> None:
    site = unpack(wheels, tmp_path)
    for file in patches:
        patch(site, file)
    folders = on_both_nodes(two_nodes, f"needed {len(patches)}")
    found = compute(python, site, "evaluate", 3, *folders)
    refused = f"job-1-4-{free}.arrow.lock from process 0"
    # Where no lock holds, a process may also read what another one has not finished to write.
    told = [
        text
        for text in found.values()
        if isinstance(text, str) and "ValueError" in text
    ]
    assert any(refused in text or "null or length 0" in text for text in told), found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("library", ["datasets", "evaluate"])
def test_patched(
    python: Path,
    wheels: list[Path],
    two_nodes: tuple[Path, Path],
    tmp_path: Path,
    library: str,
) -> None:
    site = unpack(wheels, tmp_path)
    patch(site, DATASETS)
    patch(site, EVALUATE)
    folders = on_both_nodes(two_nodes, f"patched {library}")
    expected = {"0": {"same": 1 + 2 + 3 + 4, "of": 40}, "1": None, "2": None, "3": None}
    assert compute(python, site, library, 50, *folders) == expected

    *found, refused = compute(
        python, site, library, 5, two_nodes[0] / f"objects {library}"
    )
    assert found == [{"same": 1, "of": 10}, {"same": 2, "of": 10}]
    assert "Please specify an experiment_id" in refused
