"""`--stage-env`: packed, sent, unpacked, used, removed; else the shared environment."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.batch_script import inside_text
from slurmft.core import decode, filesystem, hooks
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.files import fingerprint, write_json
from slurmft.core.filesystem import FileSystem
from slurmft.core.options import build
from slurmft.core.run_files import Environment, Rank
from slurmft.node import copies
from slurmft.plugins.stage_env import pack, unpack
from slurmft.plugins.stage_env.unpack import Sent, StageError
from slurmft.programs.description import OwnProgram
from slurmft.programs.node_environment import command_in
from slurmft.runs.rundir import RunDir
from slurmft.train.config import TrainConfig
from tests.conftest import HOSTILE, Done, assert_two_lines, slurmft
from tests.support import CHECKOUT, PATIENCE_S
from tests.support.cluster import Cluster


def staged_job(**values: str) -> JobConfig:
    return build(JobConfig, {"stage_env": True, **values})


pytestmark = pytest.mark.processes


@pytest.fixture(scope="session")
def small_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of a few files, which finds all packages in that of the tests, and slurmft
    where an editable install would say."""
    made = tmp_path_factory.mktemp("stage") / HOSTILE / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(made)]
    subprocess.run(command, check=True, timeout=60)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(made)}))
    code = CHECKOUT
    (site / "shared.pth").write_text(f"{code}\n{sysconfig.get_path('purelib')}\n")
    return made


def prefix_of(python: str) -> str:
    command = [
        python,
        "-c",
        "import sys, slurmft; print(sys.prefix, slurmft.__file__, sep='|')",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    )
    prefix, _, code = done.stdout.strip().partition("|")
    assert Path(code).is_relative_to(CHECKOUT)
    return prefix


def test_packed_once_for_each_content(tmp_path: Path, small_venv: Path) -> None:
    archives = tmp_path / "archives"
    archives.mkdir()
    first = pack.pack(str(small_venv), archives)
    assert pack.pack(str(small_venv), archives) == first
    cached = small_venv / "lib" / "__pycache__"
    cached.mkdir()
    (cached / "x.pyc").touch()
    assert pack.pack(str(small_venv), archives) == first
    extra = small_venv / "lib" / "new.py"
    extra.touch()
    second = pack.pack(str(small_venv), archives)
    extra.unlink()
    assert second != first
    assert list(archives.iterdir()) == [second.path]  # the old one is of no use


def sent(folder: Path, environment: Path) -> tuple[Path, dict[str, Sent]]:
    """An archive as sbcast leaves it on a node, and what the node's task is told."""
    (folder / "archives").mkdir()
    packed = pack.pack(str(environment), folder / "archives")
    archive = packed.path.rename(folder / f"slurmft-env-{os.getuid()}-0123.tar")
    return archive, {str(archive): Sent(str(environment), packed.sha256)}


def test_node_runs_from_its_own_disk(tmp_path: Path, small_venv: Path) -> None:
    archive, archives = sent(tmp_path, small_venv)
    with unpack.environment(archives, {"PATH": "/bin"}, lambda: False) as (
        python,
        variables,
    ):
        folder = Path(copies.of(variables)[str(small_venv)])
        assert folder.parent == tmp_path
        assert prefix_of(python) == str(folder) == variables["VIRTUAL_ENV"]
        assert variables["PATH"] == f"{folder}/bin:/bin"
        assert folder.stat().st_mode & 0o77 == 0
        assert not archive.exists()
        # another job's task leaves alone what is in use
        assert unpack.leftovers(tmp_path) == []
        assert Path(python).exists()
    assert not folder.exists()


def test_without_an_archive_nothing_changes() -> None:
    with hooks.node_python(lambda: False) as provided:
        assert (provided.python, provided.variables) == (sys.executable, {})


@pytest.mark.parametrize("fault", ["damaged", "lost", "taken", "no base", "stopped"])
def test_node_falls_back_to_the_shared_environment(
    tmp_path: Path, small_venv: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, archives = sent(tmp_path, small_venv)
    folder = Path(str(archive).removesuffix(".tar"))
    if fault == "damaged":
        archive.write_bytes(archive.read_bytes()[:2000])
    elif fault == "lost":
        archive.unlink()
    elif fault == "taken":
        folder.mkdir()
    elif fault == "no base":  # the interpreter that the environment was made with
        unpacked = tmp_path / "unpacked"
        unpacked.mkdir()
        subprocess.run(["tar", "-C", str(unpacked), "-xf", str(archive)], check=True)
        for path in (unpacked / "bin").glob("python*"):
            path.unlink()
        (unpacked / "bin" / "python").symlink_to("/nowhere/python3")
        subprocess.run(
            ["tar", "-C", str(unpacked), "-cf", str(archive), "."], check=True
        )
        digest = fingerprint(archive)["sha256"]
        archives = {str(archive): Sent(str(small_venv), digest)}
    with unpack.environment(archives, {}, lambda: fault == "stopped") as found:
        assert found == (sys.executable, {})
    assert "warning: --stage-env: " in capsys.readouterr().err
    assert not archive.exists()
    assert folder.exists() == (fault == "taken")  # what is not ours stays


def test_tar_may_complain_of_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user of the node may have filled its disk."""
    tar = tmp_path / "tar"
    tar.write_text("#!/bin/sh\nyes 'tar: x: Cannot open' | head -n 20000 >&2\nexit 2\n")
    tar.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    archive = tmp_path / "a.tar"
    archive.touch()
    give_up_at = time.monotonic() + PATIENCE_S / 10
    with (
        open(archive, "rb") as content,
        pytest.raises(StageError, match=r"cannot be unpacked:\s+tar: x: Cannot open"),
    ):
        unpack._extract(
            content,
            archive,
            tmp_path / "made",
            lambda: time.monotonic() > give_up_at,
        )


@pytest.fixture(scope="session")
def shared_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation of Python, as one on a shared file system: with a package of its own."""
    base = tmp_path_factory.mktemp("shared") / HOSTILE / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (base / "bin").mkdir(parents=True)
    shutil.copy(os.path.realpath(sys.executable), base / "bin" / version)
    (base / "bin" / "python3").symlink_to(version)
    leave_out = shutil.ignore_patterns(
        "*-packages", "test*", "idlelib", "config-*", "__pycache__"
    )
    shutil.copytree(
        sysconfig.get_path("stdlib"), base / "lib" / version, ignore=leave_out
    )
    (base / "lib" / version / "site-packages").mkdir()
    (base / "lib" / version / "site-packages" / "of_base.py").touch()
    return base


@pytest.mark.extra("stage_env")
@pytest.mark.parametrize("with_site", [False, True])
def test_program_and_its_interpreter_are_staged(
    tmp_path: Path,
    small_venv: Path,
    shared_python: Path,
    with_site: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it runs where the shared environment and its Python are out of reach."""
    shared = tmp_path / "shared" / HOSTILE
    shared.mkdir(parents=True)
    base, env = shared / "python", shared / "env"
    shutil.copytree(shared_python, base, symlinks=True)
    more = ["--system-site-packages"] if with_site else []
    make = [
        str(base / "bin" / "python3"),
        "-m",
        "venv",
        "--without-pip",
        "--symlinks",
        *more,
    ]
    subprocess.run([*make, str(env)], check=True, timeout=60)
    tool = env / "bin" / "tool"
    tool.write_text(f"#!{env}/bin/python\n")
    disk = tmp_path / "disk"
    disk.mkdir()
    job = staged_job(runs_dir=str(tmp_path / "runs"), stage_dir=str(disk))
    python = f"{env}/bin/python"
    own = OwnProgram(argv=(python,), file=python, folder=str(tmp_path), env=str(env))
    run = RunDir.create(RunConfig(program=own.program("x"), job=job))

    def kind_of(path: str) -> FileSystem:
        return FileSystem(
            type="xfs" if path == str(disk) else "nfs4", source="x", mount="/"
        )

    def sbcast(command: str, source: str, target: str, timeout_s: float) -> str:
        assert command == "sbcast"
        return str(shutil.copy(source, target))

    monkeypatch.setattr(filesystem, "of", kind_of)
    monkeypatch.setattr(commands, "call", sbcast)
    monkeypatch.setattr(sys, "prefix", str(small_venv))
    sent = pack.send(run, {})
    shared.parent.rename(tmp_path / "away")
    archives = decode.loads(sent, dict[str, Sent])
    with unpack.environment(archives, {"PATH": "/bin"}, lambda: False) as (
        python,
        variables,
    ):
        assert prefix_of(python).startswith(str(disk))
        words = (
            "import os, sys; print(sys.prefix, sys.base_prefix, os.__file__, sep='|')"
        )
        command, there = command_in(own, [*own.argv[:1], "-c", words], variables)
        told = subprocess.run(
            command, env=there, capture_output=True, text=True, check=True
        )
        prefix, base_prefix, module = told.stdout.split("|")
        copied = copies.of(variables)
        assert (prefix, base_prefix) == (copied[str(env)], copied[str(base)])
        assert module.startswith(f"{base_prefix}/lib/")
        assert (there["VIRTUAL_ENV"], there["PATH"].split(":")[0]) == (
            prefix,
            f"{prefix}/bin",
        )
        assert str(shared) not in Path(prefix, "bin", "tool").read_text()
        found = subprocess.run(
            [*command[:2], "import of_base"], env=there, capture_output=True
        )
        assert (found.returncode == 0) == with_site
    assert not list(disk.iterdir())


def test_archives_are_removed_from_the_nodes_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """srun would wait for one that has died since the job started."""
    calls: list[tuple[str, ...]] = []

    def call(*command: str, timeout_s: float = 0) -> str:
        calls.append(command)
        if command[0] == "squeue":
            return "n[1,3]\n"
        if command[:2] == ("scontrol", "show"):
            return "n1\nn3\n"
        return ""

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setattr(commands, "call", call)
    pack.clean('{"/tmp/x.tar": {"folder": "/venv", "sha256": ""}}')
    options = {"--overlap", "--nodes=2", "--ntasks=2", "--nodelist=n1,n3"}
    assert options <= set(calls[-1])


def test_program_of_slurmfts_environment_runs_from_its_copy() -> None:
    python = "/shared/venv/bin/python"
    own = OwnProgram(argv=(python, "x.py"), file="/x.py", folder="/")
    copied = {"/shared/venv": "/disk", "/shared": "/disk/.1"}
    command, there = command_in(
        own, list(own.argv), {copies.VARIABLE: json.dumps(copied)}
    )
    assert command == ["/disk/bin/python", "x.py"]
    assert "VIRTUAL_ENV" not in there
    assert command_in(own, [python], {}) == ([python], {})


@pytest.mark.processes
def test_a_file_that_changes_while_parts_of_a_conda_installation_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tar's exit code 1: Python has compiled a module meanwhile."""
    for name in ("conda-meta", "lib", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "lib" / "x.py").touch()
    tar = tmp_path / "bin" / "tar"
    tar.write_text(f'#!/bin/sh\n{shutil.which("tar")} "$@"\nexit 1\n')
    tar.chmod(0o700)
    monkeypatch.setenv("PATH", str(tar.parent), prepend=":")
    packed = tmp_path / "packed"
    packed.mkdir()
    assert pack.pack(str(tmp_path), packed, ["lib"]).path.is_file()


LOCAL = FileSystem(type="xfs", source="x", mount="/")


def test_what_killed_jobs_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, long_ago = tmp_path / f"slurmft-env-{os.getuid()}-dead", time.time() - 7200
    mine.mkdir()
    (mine / ".slurmft-lock").touch()
    for name in (
        f"{mine}.tar",
        f"{mine}-young.tar",
        str(tmp_path / "slurmft-env-99999-other.tar"),
    ):
        Path(name).touch()
        if "young" not in name:
            os.utime(name, (long_ago, long_ago))
    # its removal was cut short
    dying = tmp_path / f"slurmft-env-{os.getuid()}-dying.old"
    dying.mkdir()
    monkeypatch.setattr(filesystem, "of", lambda folder: LOCAL)
    pack.check_folder(str(tmp_path), 1)
    assert dying.exists()  # there is room: no job waits for a removal
    with pytest.raises(StageError, match="are needed"):
        pack.check_folder(str(tmp_path), 2**60)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [
        f"slurmft-env-{os.getuid()}-dead-young.tar",
        "slurmft-env-99999-other.tar",
    ]


@pytest.mark.parametrize(
    ("free", "kind", "mode", "words"),
    [
        (2**30, "xfs", 0o700, "has 1.0 GiB free, 2.1 GiB are needed"),
        (2**40, "xfs", 0, "is not a writable folder"),
        (2**40, "gpfs", 0o700, "is a shared file system (gpfs): see --stage-dir"),
        (2**40, "xfs", 0o700, ""),
    ],
)
def test_node_that_cannot_take_it(
    free: int,
    kind: str,
    mode: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filesystem, "of", lambda folder: replace(LOCAL, type=kind))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(os, "access", lambda folder, _: bool(mode))
    whole = re.escape(f"{tmp_path} on {os.uname().nodename} {words}")
    with pytest.raises(StageError, match=whole) if words else contextlib.nullcontext():
        pack.check_folder(str(tmp_path), 2**30)


def test_failed_broadcast_leaves_nothing(
    tmp_path: Path, small_venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = staged_job(runs_dir=str(tmp_path / "runs"), stage_dir=str(tmp_path))
    run = RunDir.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
    calls: list[tuple[str, ...]] = []

    def call(*command: str, timeout_s: float = 0) -> str:
        calls.append(command)
        if command[0] == "sbcast":
            raise SlurmftError("sbcast failed (exit 1): No space left on device")
        return ""

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(filesystem, "of", lambda folder: LOCAL)
    monkeypatch.setattr(commands, "call", call)
    monkeypatch.setattr(sys, "prefix", str(small_venv))
    with pytest.raises(StageError, match="No space left"):
        pack.send(run, {})
    command = list(calls[-1])
    assert command[0] == "srun"
    # It removes what the nodes may have, and nothing of another name.
    (archives,) = command[command.index("remove") + 1 :]
    (tmp_path / "mine.tar").touch()
    for name in json.loads(archives):
        Path(name).touch()
    words = [*command[command.index("-P") - 1 :][:-1]]
    for given in (archives, json.dumps([str(tmp_path / "mine.tar")])):
        subprocess.run([*words, given], check=True)
    assert (tmp_path / "mine.tar").exists()
    assert not any(Path(name).exists() for name in json.loads(archives))


@pytest.mark.parametrize(
    ("job", "cluster", "prefix", "words"),
    [
        (staged_job(), "local", sys.prefix, "works under Slurm, not with --cluster"),
        (staged_job(container="x.sif"), "slurm", sys.prefix, "--container 'x.sif'"),
        (staged_job(), "slurm", "/usr", "'/usr' is not an environment"),
        (staged_job(), "slurm", "conda", "a conda environment without conda-pack"),
    ],
)
def test_refused(
    job: JobConfig, cluster: str, prefix: str, words: str, tmp_path: Path
) -> None:
    if prefix == "conda":
        (tmp_path / "conda-meta").mkdir()
        prefix = str(tmp_path)
    with pytest.raises(UsageError) as error:
        pack.check(job, cluster, prefix)
    assert words in str(error.value)
    assert error.value.hint


def test_refused_in_two_lines(tmp_path: Path) -> None:
    done = slurmft(
        "submit", "--cluster", "local", "--stage-env", "--runs-dir", str(tmp_path)
    )
    assert_two_lines(done, "--stage-env works under Slurm")
    assert not list(tmp_path.iterdir())


def test_script_goes_on_without_it(tmp_path: Path) -> None:
    """The lines around srun, with stand-ins for the programs that they call."""
    job = staged_job(runs_dir=str(tmp_path))
    run = RunDir(tmp_path / "run")
    text = inside_text(RunConfig(program=TrainConfig.resolve().program(), job=job), run)
    tools, log = tmp_path / "bin", tmp_path / "log"
    tools.mkdir()
    python = tools / "python"
    python.write_text(
        "#!/bin/bash\nshift 3\n"
        f'[ "$1" = begin ] && echo A=1 && exit; echo "$*" >>{log}\n'
        '[ "$1" = send ] && { [ -n "$FAULT" ] || echo /tmp/archive; [ -z "$FAULT" ]; exit; }\n'
        "exit 0\n"
    )
    (tools / "srun").write_text(
        f'#!/bin/bash\necho "task ${{SLURMFT_STAGE-shared}}" >>{log}; exit 9'
    )
    for path in tools.iterdir():
        path.chmod(0o755)
    script = text.replace(sys.executable, str(python))
    told = {}
    for fault in ("", "yes"):
        env = {"PATH": f"{tools}:{os.environ['PATH']}", "FAULT": fault}
        subprocess.run(
            ["bash"], input=script, env=env, text=True, check=True, timeout=60
        )
        told[fault] = log.read_text().splitlines()
        log.unlink()
    send, end = f"send {run.path}", f"end {run.path} 9"
    assert told == {
        "": [send, "task /tmp/archive", "clean /tmp/archive", end],
        "yes": [send, "task shared", end],
    }


def test_nodes_with_the_shared_environment_are_warned_of(tmp_path: Path) -> None:
    """Only by name, once: the ranks that run from a copy are as they should be."""
    program = TrainConfig.resolve().program()
    run = RunDir.create(
        RunConfig(program=program, job=staged_job(runs_dir=str(tmp_path)))
    )
    copied = {"n1": True, "n2": False, "n3": True, "n4": False}
    ranks = []
    for node, (host, is_staged) in enumerate(copied.items()):
        for local_rank in range(2):
            number = 2 * node + local_rank
            ranks.append(Rank(rank=number, host=host, node=node, is_staged=is_staged))
    write_json(run.environment, Environment(ranks=ranks))
    (recorder,) = hooks.recorders(run)
    assert not list(recorder.messages())
    for event in ("start", "step", "epoch"):
        recorder.take({"event": event})
    (warning,) = recorder.messages()
    assert warning == (
        f"--stage-env: n2, n4 imported from the shared environment; why: {run.submitit}"
    )
    assert not list(recorder.messages())


def test_nodes_with_a_copy_are_not_warned_of(tmp_path: Path) -> None:
    program = TrainConfig.resolve().program()
    run = RunDir.create(
        RunConfig(program=program, job=staged_job(runs_dir=str(tmp_path)))
    )
    write_json(
        run.environment, Environment(ranks=[Rank(rank=0, host="n1", is_staged=True)])
    )
    (recorder,) = hooks.recorders(run)
    recorder.take({"event": "start"})
    assert not list(recorder.messages())


@pytest.mark.extra("stage_env")
@pytest.mark.slurm
def test_ranks_on_slurm_run_from_the_disk_of_their_node(
    idle_cluster: Cluster,
    tmp_path: Path,
    small_venv: Path,
    tiny_data: Path,
    tiny_model: Path,
) -> None:
    disk = tmp_path / HOSTILE
    disk.mkdir()
    command = [
        str(small_venv / "bin" / "python"),
        "-m",
        "slurmft",
        "submit",
        "--follow",
    ]
    # One node: those of the cluster have one disk, where a path is not each node's own.
    command += [
        "--runs-dir",
        str(tmp_path / "runs"),
        "--nodes",
        "1",
        "--time",
        "5",
        "--stage-env",
    ]
    command += [
        "--stage-dir",
        str(disk),
        "--cpus-per-task",
        "2",
        "--nproc-per-node",
        "2",
    ]
    command += [
        "--task",
        "emotion",
        "--data",
        str(tiny_data),
        "--model",
        str(tiny_model),
    ]
    found = idle_cluster.run([*command, "--max-steps", "2"], check=False)
    done = Done(found.returncode, found.stdout, found.stderr)
    assert done.code == 0, done.err
    ranks = json.loads(done.run.environment.read_text())["ranks"]
    assert [Path(rank["prefix"]).parent for rank in ranks] == [disk, disk]
    assert "warning" not in done.out
    assert not list(disk.iterdir())  # the node's task has removed what was its
    (log,) = done.run.submitit.glob("*_0_log.err")
    assert f"sent to {disk}" in log.read_text()


@pytest.mark.extra("stage_env")
@pytest.mark.slurm
def test_own_program_on_slurm_runs_from_the_disk_of_its_node(
    idle_cluster: Cluster, tmp_path: Path, small_venv: Path
) -> None:
    disk, env = tmp_path / "disk", tmp_path / "env"
    disk.mkdir()
    shutil.copytree(small_venv, env, symlinks=True)
    program = tmp_path / "where.py"
    program.write_text("import os, sys; print(sys.prefix, os.environ['VIRTUAL_ENV'])")
    command = [str(small_venv / "bin" / "python"), "-m", "slurmft", "run", "--follow"]
    command += ["--runs-dir", str(tmp_path / "runs"), "--time", "5", "--stage-env"]
    command += ["--stage-dir", str(disk), "--env", str(env), "--cpus-per-task", "1"]
    found = idle_cluster.run([*command, "--", str(program)], check=False)
    done = Done(found.returncode, found.stdout, found.stderr)
    assert done.code == 0, done.out + done.err
    prefix, variable = done.run.rank_log(0).read_text().splitlines()[-1].split()[-2:]
    assert prefix == variable
    # beside slurmft's, in the folder of the task
    assert Path(prefix).parents[1] == disk
    assert not list(disk.iterdir())
