"""Every file that a command reads, damaged: words and an exit code; never a traceback, a wait, much
memory, or another state. Whatever is wrong with one run, the others are shown.

SLURMFT_DAMAGES=1000 damages each file as often, in other ways than by default.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from slurmft.__main__ import main
from slurmft.cluster import wait
from slurmft.cluster.slurm import commands
from slurmft.core.config import RunConfig
from slurmft.core.errors import Exit, SlurmftError, run_main
from slurmft.core.files import write_json
from slurmft.core.permissions import current_umask
from slurmft.core.program import OWN, Program
from slurmft.core.run_files import Failure, Snapshot
from slurmft.runs import frozen_code
from tests.support.damage import NO_FILES, damaged, remove
from tests.support.json_output import assert_fits
from tests.support.made_runs import write_run

pytestmark = pytest.mark.processes  # git, and what asks for hardware

_COUNT = int(os.environ.get("SLURMFT_DAMAGES", "0"))
_LONGEST_S = 10
_MOST_BYTES = 500 * 2**20

FINISHED = "runs/emotion-20261120-093012-a1b2"
FAILED = "runs/emotion-20261121-093012-c3d4"
LOCAL = "runs/emotion-20261122-093012-e5f6"
OWN_RUN = "runs/train-20261123-093012-a7b8"
PULLED = "runs/emotion-20261125-093012-d1e2"
ARRAY_TASK = "runs/emotion-20261126-093012-f3a4"
OF_STUDY = "studies/small/runs/emotion-20261124-093012-c9d0"
RUNS = (FINISHED, FAILED, LOCAL, OWN_RUN, PULLED, ARRAY_TASK)

READING: tuple[list[str], ...] = (
    ["status", "RUN"],
    ["status", "RUN", "--json"],
    ["status", "last"],
    ["list"],
    ["list", "--json", "--sort", "loss"],
    ["list", "--cost", "--model", "bert"],
    ["logs", "RUN"],
    ["logs", "RUN", "--json", "--attempt", "1"],
    ["logs", "RUN", "--tail", "3", "--node", "0"],
    ["clean", "--dry-run"],
    ["report", "runs"],
    ["report", "runs", "--format", "csv"],
    ["report", "studies/small", "--format", "latex"],
    ["report", "runs", "--peak-tflop-per-s", "3"],
    ["report", "RUN", FINISHED, "--compare"],
    ["report", FINISHED, "RUN", "--compare", "--json"],
    ["report", "studies/small/table.json"],
    ["plan", "runs"],
    ["follow", "RUN"],
    ["watch", "RUN"],
    ["study", "status", "studies/small"],
    ["study", "status", "studies/small", "--json"],
    ["study", "run", "studies/small/study.toml", "--dry-run"],
    ["resume", "RUN", "--dry-run"],
    ["predict", "RUN", "rows.csv", "--dry-run"],
    ["push", "RUN", "ada/model"],
    ["submit", "--task", "synthetic", "--dry-run"],
    ["list", "--on", "far"],
    ["cancel", "RUN"],
    ["cancel", "RUN", "--json"],
    ["resume", "RUN", "--dry-run", "--json"],
    ["list", "--ettr"],
    ["status", "RUN", "--json", "--runs-dir", "runs"],
    ["submit", "--after", "RUN", "--task", "synthetic", "--dry-run"],
    ["study", "cancel", "studies/small"],
)  # fmt: skip
"""Commands that change nothing here. RUN is the run of the damaged file."""
if _COUNT:
    READING += (["report", "runs", "--output", "out"],)  # it draws

OF_A_RUN = (
    "config.json", "state.json", "records.jsonl", "job.json", "attempt.json", "started.json",
    "environment.json", "packages.json", "failures/rank-0.json", "logs/rank-000.log",
    "logs/node-000.log", "collectives.json", "ended.json", "memory.json", "meeting.json",
    "logs/collectives-rank-000.json",
)  # fmt: skip
FILES = (
    *(f"{FAILED}/{name}" for name in OF_A_RUN),
    f"{FINISHED}/result.json",
    f"{FINISHED}/state.json",
    f"{FINISHED}/records.jsonl",
    f"{FINISHED}/config.json",
    f"{FINISHED}/model/config.json",
    f"{LOCAL}/job.json",
    f"{LOCAL}/submitit/pid.json",
    f"{LOCAL}/submitit/controller.json",
    f"{LOCAL}/submitit/5_0_log.out",
    f"{LOCAL}/checkpoints/step-00000010/manifest.json",
    f"{OWN_RUN}/config.json",
    f"{OWN_RUN}/result.json",
    f"{OWN_RUN}/code.sums",
    f"{PULLED}/origin.json",
    f"{PULLED}/config.json",
    f"{ARRAY_TASK}/job.json",
    f"{ARRAY_TASK}/state.json",
    f"{ARRAY_TASK}/attempt.json",
    f"{OF_STUDY}/config.json",
    f"{OF_STUDY}/result.json",
    "studies/small/study.toml",
    "studies/small/table.json",
    "site.toml",
    "clusters.toml",
)

FOLDERS = (
    *(f"{FAILED}/{name}" for name in ("failures", "logs", "submissions", "notifications")),
    f"{FINISHED}/model",
    f"{LOCAL}/checkpoints",
    f"{OWN_RUN}/code",
    "studies/small/runs",
)  # fmt: skip

_SHADOWS = ("nodes", "min_nodes", "spare_nodes", "after", "time", "mem", "requeue", "batch_size",
            "global_batch_size", "epochs", "nproc_per_node", "precision", "cluster")  # fmt: skip
"""Options that code reads of a configuration of any version."""

_DECIDE = ("config.json", "state.json", "job.json", "result.json", "attempt.json",
           "pid.json", "controller.json")  # fmt: skip
"""Files of a run that its state, and what is listed of it, follow from."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs of all kinds, a study, a site file; the working directory is theirs."""
    top = tmp_path_factory.mktemp("world")
    write_world(top)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(top)
        patch.setenv("SLURMFT_SITE", str(top / "site.toml"))
        patch.setenv("SLURMFT_CLUSTERS", str(top / "clusters.toml"))
        patch.setenv("XDG_STATE_HOME", str(top / "state"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(commands, "call", call_slurm)
        patch.setattr(wait, "_FILE_LAG_S", 0.1)
        patch.setattr(wait, "_LOST_AFTER_S", 0.1)
        # Whatever a command imports, it has imported before its time is taken.
        for command in READING:
            _run(_about(command, FINISHED))
        yield top


def call_slurm(name: str, *arguments: str, **_: Any) -> str:
    """Slurm, whose accounting knows that both jobs have ended."""
    if name == "sacct":
        each = "JobID," if "--format=JobID,State,ExitCode" in arguments else ""
        return "11|COMPLETED|0:0\n12|FAILED|1:0\n" if each else "FAILED|1:0\n"
    raise SlurmftError(f"{name}: Invalid job id specified")


def write_world(top: Path) -> None:
    finished = write_run(top / FINISHED)
    write_json(finished.job, {"cluster": "slurm", "id": "11"})
    finished.model.mkdir()
    write_json(finished.model / "config.json", {"model_type": "bert"})
    _write_failed(top / FAILED)
    _write_local(top / LOCAL)
    _write_own(top / OWN_RUN)
    _write_pulled(top / PULLED)
    _write_array_task(top / ARRAY_TASK)
    _write_study(top / "studies" / "small", top / OF_STUDY)
    (top / "rows.csv").write_text("text\ngood\n")
    (top / "site.toml").write_text(
        'runs_dir = "runs"\npartition = "gpu"\nsetup = ["true"]\nnodes = 1\n'
    )
    (top / "clusters.toml").write_text(
        '[far]\nhost = "far"\npython = "python"\nssh = "false"\nsetup = ["true"]\n'
        'folder = "here"\n[far.site]\npartition = "gpu"\n'
    )


def _write_failed(path: Path) -> None:
    run = write_run(path, state="failed", nodes=2)
    write_json(run.job, {"cluster": "slurm", "id": "12"})
    attempt = {"number": 1, "job": "12", "hosts": ["n1", "n2"], "time": 1000.0}
    write_json(run.attempt, attempt)
    write_json(run.started, {"attempt": 1, "meetings": 1})
    write_json(run.packages, {"1": {"torch": "2.13.0"}})
    environment = json.loads(run.environment.read_text())
    for rank in environment["ranks"]:
        rank |= {"cores": "0-3", "hardware": {"cpus": "0-7", "gpus": [], "memory": 1}}
    write_json(run.environment, environment)
    error = SlurmftError("the disk is full", "free some")
    run.add(Failure.of("rank 0 on n1", error, traceback="Traceback", attempt=1))
    next(run.failures.iterdir()).rename(run.failures / "rank-0.json")
    records: list[dict[str, Any]] = [
        {"event": "resume", "step": 5, "checkpoint": "step-5", "changes": ["x"]},
        {"event": "epoch", "epoch": 1, "step": 10, "loss": 0.2, "metrics": {"f1": 0.5}},
        {"event": "evaluate", "done": 5, "total": 10},
        {"event": "warning", "text": "slow"},
        {"event": "ranks", "step": 10, "own_ms": [1.5], "memory_mib": [100, 200]},
        {"event": "stopping", "step": 20, "reason": "SIGTERM"},
    ]
    with open(run.records, "a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps({"time": 1002.0} | record) + "\n")
    write_json(run.ended, {"attempt": 1, "code": 1})
    write_json(run.memory, {"train_samples": 8, "tried_samples": 16})
    decision = {"backend": "gloo", "hosts": ["n1", "n2"], "numbers": 9, "gloo_s": 0.1}
    write_json(run.collectives, decision | {"dtype": "float32"})
    write_json(run.rendezvous, {"hosts": ["n1", "n2"], "port": 4711, "id": "12.1"})
    call = {"group": "gloo:0", "number": 3, "operation": "all_reduce", "bytes": 8}
    calls = {
        "world_size": 2,
        "lost_peer": False,
        "is_full": False,
        "where": "train.py:2",
    }
    calls["groups"] = {"gloo:0": {"last": 3, "ranks": [0, 1], "description": "all"}}
    calls["calls"] = [call | {"waits": True, "seconds": 9.5}]
    of_rank = {"rank": 0, "host": "n1", "attempt": 1, "process": "S", "step": 9}
    write_json(run.rank_calls(0), of_rank | {"phase": "train", "calls": calls})
    stamp = "2026-11-21T10:00:00.000000"
    for name in ("rank-000.log", "node-000.log"):
        head = f"{stamp} rank 0 on n1, attempt 1, pid 7"
        (run.logs / name).write_text(f"{head}\none\ntwo\n")


def _write_local(path: Path) -> None:
    """A run whose process was killed."""
    run = write_run(path, state="running")
    write_json(run.job, {"cluster": "local", "id": "4194305"})
    checkpoint = run.checkpoints / "step-00000010"
    checkpoint.mkdir(parents=True)
    write_json(
        checkpoint / "manifest.json", {"files": {"a": {"bytes": 1, "sha256": ""}}}
    )
    run.submitit.mkdir()
    for name in ("pid.json", "controller.json"):
        gone = {"pid": 4194305, "started": "1", "boot": "b"}
        write_json(run.submitit / name, gone)
    (run.submitit / "5_0_log.out").write_text("srun: error\n")


def _write_own(path: Path) -> None:
    run = write_run(path, result={"metrics": {"f1": 0.5}, "primary_metric": "f1"})
    config = RunConfig.from_json(run.config.read_text())
    settings = {
        "argv": ["python", "train.py", "--lr", "0.1"],
        "folder": "/home/ada",
        "file": "/home/ada/train.py",
        "checkpoint_dir": "out",
    }
    data = {"bytes": 1, "mtime_ns": 1, "sha256": "a", "what": "file"}
    program = Program(
        kind=OWN, module="", name="train", settings=settings, inputs={"rows.csv": data}
    )
    run.code.mkdir()
    (run.code / "train.py").write_text("")
    line = frozen_code.line("644", hashlib.sha256().hexdigest(), "train.py")
    snapshot = Snapshot(mode="folder", files=1, sha256=frozen_code.record(run, [line]))
    submission = replace(config.submission, snapshot=snapshot)
    config = replace(config, program=program, submission=submission)
    run.config.write_text(config.to_json())


def _write_pulled(path: Path) -> None:
    """A run from a cluster, to which its user has agreed."""
    run = write_run(path, state="failed")
    came_from = {"cluster": "far", "path": "/x", "owner": "ada", "is_own": True}
    came_from |= {"user": "ada", "time": 1000.0, "accepted": ["program"]}
    write_json(run.path / "origin.json", came_from)


def _write_array_task(path: Path) -> None:
    """A task of a job array that has run out of memory, and goes on with more."""
    run = write_run(path, state="running", nodes=2)
    run.set_state("requeued", "out of memory", 1, raised_mem_mib=4096)
    run.set_state("running", attempt=2, checkpoint="step-00000010")
    write_json(run.job, {"cluster": "slurm", "id": "13_4", "where": "lab"})
    attempt = {"number": 2, "job": "13_4", "hosts": ["n1", "n2"], "time": 1000.0}
    write_json(run.attempt, attempt | {"restarts": 1, "submission": 1})
    run.set_state("failed", "exit code 1", 1)


def _write_study(folder: Path, path: Path) -> None:
    entry = {"name": "small", "cell": {"nodes": 1}, "repeat": 1}
    write_run(path, submission={"study": entry})
    (folder / "study.toml").write_text(
        'name = "small"\ntitle = "Small"\nscaling = "weak"\nrepeats = 2\nretries = 1\n'
        'published = "table.json"\n\n[fixed]\ntask = "emotion"\nmax_steps = 3\n\n'
        "[grid]\nnodes = [1, 2]\n"
    )
    table = {
        "name": "a paper",
        "source": "a page",
        "setup": {"gpus": 4},
        "columns": ["nodes", "time_s"],
        "rows": [[1, 10.0], [2, 6.0]],
    }
    write_json(folder / "table.json", table)


# --- what is damaged, and what comes of it --------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", FILES)
def test_damaged(world: Path, name: str) -> None:
    _damage(world, name, _COUNT or 5)


@pytest.mark.parametrize("where", ["job", "settings"])
@pytest.mark.parametrize("option", _SHADOWS)
def test_options_of_any_type(world: Path, option: str, where: str) -> None:
    """Whoever has written a configuration may have given an option to the job or the program."""
    name = f"{FINISHED}/config.json"
    content = (world / name).read_bytes()
    values: list[Any] = ["x", -1, [], {"a": 1}, None, 1e300, "0-99999999999"]
    for value in values:
        config = json.loads(content)
        place = config["job"] if where == "job" else config["program"]["settings"]
        place[option] = value
        (world / name).write_text(json.dumps(config))
        try:
            chosen = Random(f"{option} {where} {value}").sample(READING, 2)
            chosen.append(["report", "runs", "--format", "csv"])
            _check(world, name, f"{where}.{option} = {value}", chosen)
        finally:
            (world / name).write_bytes(content)


@pytest.mark.extra("faults")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_damaged_often(world: Path, name: str) -> None:
    _damage(world, name, 100)


def _damage(world: Path, name: str, count: int) -> None:
    content = (world / name).read_bytes()
    for seed in range(count):
        random = Random(f"{name} {seed} {count}")
        (world / name).write_bytes(damaged(name, content, random))
        try:
            _check(world, name, f"seed {seed}", random.sample(READING, 2))
        finally:
            (world / name).write_bytes(content)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_no_file_at_all(world: Path, name: str) -> None:
    """Another account may put anything into a folder of runs that is shared."""
    aside = world / "aside"
    is_there = (world / name).exists()
    if is_there:
        (world / name).rename(aside)
    try:
        chosen_kinds = sorted(NO_FILES)
        if not _COUNT:
            chosen_kinds = Random(name).sample(chosen_kinds, 4)
        for kind in chosen_kinds:
            chosen = Random(f"{name} {kind}").sample(READING, 1)
            if _COUNT:
                chosen = list(READING)
            NO_FILES[kind](world / name)
            try:
                _check(world, name, kind, chosen)
            finally:
                remove(world / name)
    finally:
        if is_there:
            aside.replace(world / name)


@pytest.mark.extra("faults")
@pytest.mark.timeout(300)
def test_very_many_files(world: Path) -> None:
    folders = {
        "failures": "rank-0-on-n1-7-{}.json",
        "logs": "rank-{}.log",
        "checkpoints": "step-{:08}",
        "submissions": "{}",
        "submitit": "{}_0_log.out",
    }
    run = world / FAILED
    for folder, name in folders.items():
        (run / folder).mkdir(exist_ok=True)
        for number in range(1, 100_001):
            (run / folder / name.format(number)).touch()
    for command in READING:
        words = _about(command, FAILED)
        code, _, err = _limited(f"very many files: {words}", words)
        assert code in set(Exit), (words, err)
    for folder, name in folders.items():
        for number in range(1, 100_001):
            (run / folder / name.format(number)).unlink()


def _check(world: Path, name: str, case: str, chosen: list[list[str]]) -> None:
    """Runs commands; then looks at the list of all runs."""
    run = str(Path(*Path(name).parts[:2]))
    if run not in RUNS:
        run = FINISHED
    for command in (*chosen, ["list", "--json"]):
        words = _about(command, run)
        what = f"{name}, {case}: {' '.join(words)}"
        before = _content(world)
        recorded = (world / LOCAL / "state.json").read_bytes()
        code, out, err = _limited(what, words)
        assert code in set(Exit), (what, code, err)
        assert "Traceback (most recent" not in err, (what, err)
        # The others are reported.
        if command[:2] == ["report", "runs"] and name.startswith("runs/"):
            assert code == Exit.OK, (what, err)
        if "--json" in words and code == Exit.OK:
            assert_fits(words, out)
        # ssh has a stderr of its own.
        if code and "--on" not in command:
            assert err, what
        # Who follows a run that has ended without a word records its end.
        if command[0] in ("follow", "watch"):
            (world / LOCAL / "state.json").write_bytes(recorded)
        else:
            assert _content(world) == before, what
    if not name.endswith("site.toml"):
        _check_list(name, case, json.loads(out))


def _about(command: list[str], run: str) -> list[str]:
    return [run if word == "RUN" else word for word in command]


def _limited(what: str, words: list[str]) -> tuple[int, str, str]:
    """Runs a command, which may take little time and memory."""

    def give_up(*_: Any) -> None:
        raise AssertionError(f"{what}: it does not end")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm") as file:
        data_bytes = int(file.read().split()[5]) * resource.getpagesize()
    before = (
        signal.signal(signal.SIGPROF, give_up),
        signal.signal(signal.SIGALRM, give_up),
    )
    # Of the processor: the machine may be busy. A wait takes none of it.
    signal.setitimer(signal.ITIMER_PROF, _LONGEST_S)
    signal.alarm(6 * _LONGEST_S)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + _MOST_BYTES, hard))
    try:
        return _run(words)
    except BaseException as error:
        error.add_note(what)
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


def _content(world: Path) -> dict[str, tuple[int, int]]:
    """The files of all runs and studies but locks, with their sizes and times."""
    content = {}
    for top in ("runs", "studies"):
        for folder, _, names in os.walk(world / top):
            for each in set(names) - {".lock"}:
                status = os.lstat(os.path.join(folder, each))
                content[f"{folder}/{each}"] = (status.st_size, status.st_mtime_ns)
    return content


_STATES = {
    FINISHED: "finished",
    FAILED: "failed",
    LOCAL: "vanished",
    OWN_RUN: "finished",
    PULLED: "failed",
    ARRAY_TASK: "failed",
}


def _check_list(name: str, case: str, listing: dict[str, Any]) -> None:
    """Every run is listed with its state, or said to be left out."""
    states = {run["name"]: run["state"] for run in listing["runs"]}
    for run, state in _STATES.items():
        listed = states.get(Path(run).name)
        if not name.startswith(run):
            assert listed == state, (name, case, run)
        elif listed is None:
            assert any(run in problem for problem in listing["problems"]), (name, case)
        elif Path(name).name not in _DECIDE:
            assert listed == state, (name, case)


def _run(command: list[str]) -> tuple[int, str, str]:
    """A command within this process: exit code, stdout, stderr."""
    mask = current_umask()  # who follows a run has another
    try:
        with _Stream() as out, _Stream() as err:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run_main(lambda: main(list(command)))
            return code, out.text(), err.text()
    finally:
        os.umask(mask)


class _Stream(io.TextIOWrapper):
    """A stream as sys.stdout is one, in memory."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, encoding="utf-8", errors="backslashreplace")

    def text(self) -> str:
        self.flush()
        return self._bytes.getvalue().decode()
