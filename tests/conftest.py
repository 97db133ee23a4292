"""Fixtures of all tests: runs by the real command line, and the one Slurm of a session."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from slurmft.core.run_files import ATTEMPT
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from tests.support import PATIENCE_S, json_output, layers, prepared, reaping, until
from tests.support.cluster import Cluster
from tests.support.lockfs import TwoNodes, missing
from tests.support.models import write_emotion, write_model
from tests.support.small_disk import SmallDisk

_SLURM_PREFIXES = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_")
# readline sets them; a test sets up its own terminal
_TERMINAL_SIZE = ("COLUMNS", "LINES")
for _name in list(os.environ):
    if _name.startswith(_SLURM_PREFIXES) or _name in _TERMINAL_SIZE:
        del os.environ[_name]
# No test reaches a Slurm of this machine: its commands fail at once. The test cluster names its own
# configuration.
os.environ["SLURM_CONF"] = os.devnull
# With it, what a process prints reaches a pipe sooner: a test may need that, and fail elsewhere.
os.environ.pop("PYTHONUNBUFFERED", None)
# torch's threads that wait for work leave the cores to other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
_start_process: Any = subprocess.Popen.__init__


@functools.wraps(_start_process)
def _start_without_slurm(process: Any, *arguments: Any, **options: Any) -> None:
    """Also where a test gives a process an environment of its own."""
    given = options.get("env")
    if given is None:
        given = os.environ
    options["env"] = {"SLURM_CONF": os.devnull, **given}
    _start_process(process, *arguments, **options)


subprocess.Popen.__init__ = _start_without_slurm  # type: ignore[method-assign, assignment]
# Under nohup, or in the background of a script, SIGINT is ignored, and would be in every command
# that a test starts: Ctrl-C could not be tested.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# How fast a busy machine is, is no matter.
settings.register_profile(
    "slurmft", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("slurmft")

HOSTILE = 'it\'s a "test"; echo $HOME é 100% `x`'
"""A folder name with everything that shells, Slurm and JSON treat specially, bar line breaks."""


LAYERS = ("processes", "extra", "slurm", "gpu", "lab")
"""Marks of tests that start processes; others are pure."""

LONG_FILES = (
    "test_transformers.py", "test_lightning.py", "test_mpirun.py", "test_trainer.py",
    "test_resume.py", "test_sharding.py", "test_hub_cache.py", "test_patches.py",
    "test_commands.py", "test_tasks.py", "test_locks.py", "test_profiles.py", "test_hub.py",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slurm", action="store_true", help="run the tests on a real Slurm too"
    )
    parser.addoption(
        "--gpu", action="store_true", help="fail where the tests on a GPU find none"
    )
    parser.addoption(
        "--lab", action="store_true", help="run the labs of real file systems too"
    )
    parser.addoption(
        "--extra",
        default="",
        metavar="AREA,...",
        help="run the tests marked extra(AREA), too: docs, versions, mpi, ...; all: every area",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Tests on Slurm come first, as one worker has them all; then files that take long: at the end
    no worker waits for another."""
    items.sort(
        key=lambda item: (item.get_closest_marker("slurm") is None, _place(item.path))
    )
    items[:] = _selected(config, items)
    if config.getoption("--slurm"):
        return
    skip = pytest.mark.skip(reason="needs a real Slurm: give --slurm")
    for item in items:
        if item.get_closest_marker("slurm"):
            item.add_marker(skip)


def _selected(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Leaves out labs, and areas that --extra does not name."""
    areas = set(config.getoption("--extra").split(","))
    with_labs = config.getoption("--lab")

    def is_selected(item: pytest.Item) -> bool:
        if item.get_closest_marker("lab") and not with_labs:
            return False
        own_areas = {area for mark in item.iter_markers("extra") for area in mark.args}
        return "all" in areas or own_areas <= areas

    selected = [item for item in items if is_selected(item)]
    config.hook.pytest_deselected(
        items=[item for item in items if not is_selected(item)]
    )
    return selected


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, Any]:
    """An extra test that was asked for fails where it would be skipped: its area is not covered."""
    report = yield
    is_extra = item.get_closest_marker("extra") is not None
    if is_extra and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report


def _place(file: Path) -> int:
    return LONG_FILES.index(file.name) if file.name in LONG_FILES else len(LONG_FILES)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two workers a core, as tests wait for half of their time; a worker and what it starts take up
    to 2 GiB. The longest files keep eight busy to the end, and not more."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(2 * cores, memory // 2**31, 8))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that need the one Slurm are one worker's; others of a file keep together, for what
    their modules share."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # by the number of tests

    class ByFile(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            name = test.partition("[")[0]
            on_slurm = config.getoption("--slurm") and need_slurm(
                config.rootpath / file, name
            )
            return "slurm" if on_slurm else file

    return ByFile(config, log)


def need_slurm(file: Path, test: str) -> bool:
    """Whether a test, or its whole file, is marked so: the process that hands the tests out has
    not imported them."""
    return bool({test, None} & _marked_slurm(file))


@functools.cache
def _marked_slurm(file: Path) -> set[str | None]:
    """Names of the tests that are marked slurm; None: all are."""
    found: set[str | None] = set()
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.FunctionDef):
            if any(
                "mark.slurm" in ast.unparse(mark) for mark in statement.decorator_list
            ):
                found.add(statement.name)
        elif isinstance(statement, ast.Assign) and "mark.slurm" in ast.unparse(
            statement
        ):
            found.add(None)
    return found


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Four nodes of a real Slurm. A test that wants it fails if it cannot start."""
    with Cluster(nodes=4) as made:
        yield made


@pytest.fixture
def idle_cluster(cluster: Cluster) -> Cluster:
    """The cluster with no job in it, not even one that a failed test left behind."""
    cluster.run(["scancel", "--user=root"])
    cluster.wait_idle()
    return cluster


@pytest.fixture(scope="session")
def two_nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path]]:
    """A shared folder as two nodes see it whose file system keeps flock() to itself."""
    reason = missing()
    if reason and not request.config.getoption("--slurm"):
        pytest.skip(reason)
    assert not reason, reason
    with TwoNodes(tmp_path_factory.mktemp("lockfs")) as made:
        yield made.nodes


@pytest.fixture
def shared_folder(
    cluster: Cluster, two_nodes: tuple[Path, Path], tmp_path: Path
) -> Iterator[Path]:
    """A folder of all nodes whose flock is local to each: n1 and n3 are one client, n2 and n4 the
    other."""
    folder = tmp_path / "shared"
    folder.mkdir()
    mount = ["mount", "--bind", str(two_nodes[0]), str(folder)]
    subprocess.run(mount, check=True, timeout=30)  # the login node sees it, too
    with cluster.showing(two_nodes[::-1], folder):
        yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of one MiB; see `fill` beside it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    with SmallDisk(tmp_path / "small", 1) as folder:
        yield folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved BERT of a few thousand weights, with its tokenizer."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny bert")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of made-up emotion texts: 203 for training, 67 for validation."""
    return write_emotion(
        tmp_path_factory.mktemp("data") / "tiny emotion", train=203, validation=67
    )


@pytest.fixture(scope="session", autouse=True)
def session_mark() -> Iterator[None]:
    """What fixtures of modules and sessions start has a mark as well."""
    with reaping.marked(f"{_SESSION_MARK}-0"):
        yield


@pytest.fixture(autouse=True)
def nothing_left_running(tmp_path: Path) -> Iterator[None]:
    """Ends the processes that a test leaves behind, also where it fails or takes too long."""
    number = next(_test_numbers)
    with reaping.reaped(f"{_SESSION_MARK}-{number}", tmp_path, prepared.server_pid):
        yield


@pytest.fixture(autouse=True)
def in_its_layer(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test without the mark of a layer starts no process."""
    if any(request.node.get_closest_marker(layer) for layer in LAYERS):
        yield
        return
    with layers.pure(request.node.nodeid):
        yield


def pytest_sessionfinish() -> None:
    """Ends what fixtures of modules and sessions may have left."""
    reaping.kill_marked(f"{_SESSION_MARK}-")


_SESSION_MARK = f"{os.getpid()}-{os.urandom(4).hex()}"
_test_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def same_process() -> Iterator[None]:
    """Commands that run within this process settle its umask, block stop signals, and begin
    attempts: all are inherited by what later tests start."""
    umask = os.umask(0o022)
    os.umask(umask)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    os.umask(umask)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.environ.pop(ATTEMPT, None)


@pytest.fixture(autouse=True)
def no_site_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's own site file must not decide about tests."""
    monkeypatch.delenv("SLURMFT_SITE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@dataclass
class Done:
    """A finished slurmft command."""

    code: int
    out: str
    err: str

    @property
    def run(self) -> RunDir:
        """The run directory that the command printed."""
        line = next(x for x in self.out.splitlines() if x.startswith("run directory: "))
        return RunDir.open(line.removeprefix("run directory: "))

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run.result.read_text())
        return found


def modes(folder: Path) -> dict[str, set[int]]:
    """The modes of folders and of files at any depth, a folder's own included."""
    found: dict[str, set[int]] = {"folders": set(), "files": set()}
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():  # it has no mode
            continue
        kind = "folders" if path.is_dir() else "files"
        found[kind].add(stat.S_IMODE(path.stat().st_mode))
    return found


class Following:
    """A `slurmft submit --follow` in the background; of an `imported` one see `slurmft`."""

    command = "submit"

    def __init__(
        self, *arguments: str, env: dict[str, str] | None = None, imported: bool = False
    ) -> None:
        self.process = subprocess.Popen(
            [*_command(imported), self.command, "--follow", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | (env or {}),
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.run = RunDir.open(
            self.until("run directory: ").removeprefix("run directory: ")
        )

    @property
    def job_id(self) -> str:
        found: dict[str, str] = json.loads(self.run.job.read_text())
        return found["id"]

    def until(self, text: str) -> str:
        """Reads on to the line that has this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError("\n".join(self.lines))

    def at_step(self, step: int) -> None:
        """Waits until a step is recorded. On the screen it is up to two seconds later, and the run
        may have come to its end."""
        reader = RecordReader(self.run.records)

        def is_there() -> bool:
            found = [r["step"] for r in reader.read_values("step")]
            assert self.process.poll() is None or found, self.end()[1]
            return max(found, default=0) >= step

        until(is_there, self.run.history, every_s=0.02)

    def end(self, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
        """Exit code, and all that was printed."""
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.lines += rest.splitlines()
        return self.process.returncode, "\n".join(self.lines)


def slurmft(
    *arguments: str,
    env: dict[str, str] | None = None,
    timeout_s: float = PATIENCE_S,
    imported: bool = False,
    enter: Sequence[str] = (),
) -> Done:
    """Runs a slurmft command as users do: in a process of its own.

    Args:
        enter: a command that runs it, such as that of tests/support/control_group.py.
        imported: this process, and those of the job that it starts on this machine, are forked
            from one that has imported what ranks import, see tests/support/prepared.py.
    """
    done = subprocess.run(
        [*enter, *_command(imported), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | (env or {}),
        check=False,
    )
    assert not advises_itself(arguments, done.stderr), done.stderr
    # Of several clusters there are as many answers, and behind "--" stand the flags of a program.
    if "--json" in arguments and not {"--on", "--"} & {*arguments} and done.stdout:
        json_output.assert_fits(arguments, done.stdout)
    return Done(done.returncode, done.stdout, done.stderr)


def advises_itself(arguments: tuple[str, ...], errors: str) -> bool:
    """Whether the hint of a command that has failed is to type it again, with nothing changed."""
    hints = [line for line in errors.splitlines() if line.startswith("hint: ")]
    if not arguments or not hints:
        return False
    name, *others = arguments
    unchanged = ("", "...", shlex.join(others))
    advised = re.findall(rf"slurmft {re.escape(name)}\b([^;,)`]*)", hints[-1])
    return any(words.strip() in unchanged for words in advised)


def _command(imported: bool) -> list[str]:
    return (
        prepared.command("slurmft") if imported else [sys.executable, "-m", "slurmft"]
    )


def assert_two_lines(done: Done, fact: str) -> None:
    """A request that cannot be right: what is wrong, with the value, and what to do about it."""
    assert done.code == 2
    error, hint = done.err.splitlines()
    assert error.startswith("error: ")
    assert fact in error
    assert hint.startswith("hint: ")


def records(run: RunDir, event: str) -> list[dict[str, Any]]:
    """The records of one kind; a full disk may have cut some short."""
    return list(RecordReader(run.records).read_values(event))
