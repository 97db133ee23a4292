"""`slurmft run --env` and `--accelerate-config`: real virtual environments, real Accelerate."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest

import slurmft as package
from slurmft import locks
from slurmft.core import fingerprint, interpreter
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError
from slurmft.core.trusted import MARK, NotOwnError
from slurmft.programs import environment, submission
from slurmft.programs.description import FLAGS
from slurmft.runs import attempts
from slurmft.runs.rundir import RunDir
from tests.conftest import assert_two_lines
from tests.programs.test_own_program import here, lines_of, run
from tests.support import PATIENCE_S
from tests.support.ccl import stand_in
from tests.support.own_programs import write

pytestmark = pytest.mark.processes

__all__ = ["here"]  # a fixture: each test has a folder of its own, and is in it

FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1234
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
dynamo_config:
  dynamo_mode: reduce-overhead
mixed_precision: bf16
num_machines: 4
num_processes: 32
main_process_ip: 10.0.0.1
"""
STATE = """\
import os
from accelerate import Accelerator, FullyShardedDataParallelPlugin
accelerator = Accelerator(cpu=True)
plugin = FullyShardedDataParallelPlugin()  # what Accelerator makes of the variables on GPUs
print(accelerator.mixed_precision, accelerator.num_processes, os.environ["ACCELERATE_USE_FSDP"])
print(plugin.fsdp_version, plugin.min_num_params, plugin.reshard_after_forward)
print(os.environ["ACCELERATE_DYNAMO_MODE"], os.environ["MASTER_ADDR"])
"""


@pytest.mark.extra("environments")
def test_accelerate_has_what_its_file_says(here: Path) -> None:
    write(here, "state.py", STATE)
    write(here, "fsdp.yaml", FSDP)
    done = run(
        *("--nodes", "2", "--accelerate-config", "fsdp.yaml", "--profile", "cpu"),
        *("--", "state.py"),
    )
    assert done.code == 0, done.out + done.err
    for rank in (0, 1):
        said = "\n".join(lines_of(done.run, rank))
        assert "bf16 2 true\n2 1234 False\nreduce-overhead 127.0.0.1" in said
    ignored = "num_machines, num_processes, main_process_ip"
    assert f"the job decides, not that file: {ignored}" in done.err
    assert str(here / "fsdp.yaml") in done.run.load_config().program.inputs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("a: [", "is no YAML with a distributed_type: while parsing"),
        ("- a", "is no YAML with a distributed_type"),
        ("debug: true", "is no YAML with a distributed_type"),
        ("distributed_type: DEEPSPEED", "needs deepspeed"),
    ],
)
def test_refused_files(here: Path, text: str | None, words: str) -> None:
    write(here, "x.py", "")
    if text is not None:
        write(here, "accelerate.yaml", text)
    done = run("--accelerate-config", "accelerate.yaml", "--", "x.py", follow=False)
    assert_two_lines(done, words)
    assert not (here / "runs").exists()


@pytest.mark.extra("environments")
def test_what_only_accelerate_can_see_ends_the_run_in_its_words(here: Path) -> None:
    write(here, "x.py", "print('ran')")
    write(
        here,
        "a.yaml",
        "distributed_type: MULTI_GPU\nmixed_precision: fp7\nnum_processes: 2",
    )
    done = run("--accelerate-config", "a.yaml", "--", "x.py")
    assert done.code != 0
    assert "Unknown mixed_precision mode: fp7" in done.out + done.err
    assert "Traceback" not in done.out + done.err
    assert not done.run.rank_log(0).exists()


# --- --env ----------------------------------------------------------------------------------------


def make_venv(folder: Path) -> Path:
    """A virtual environment that has nothing but Python and one package."""
    command = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)]
    subprocess.run(command, check=True, timeout=60)
    (site(folder) / "theirs.py").write_text("word = 'theirs'\n")
    (site(folder) / "theirs-1.0.dist-info").mkdir()
    tool = folder / "bin" / "their-tool"
    tool.write_text("#!/bin/sh\npython -c 'import theirs; print(theirs.word)'\n")
    tool.chmod(0o755)
    return folder


def site(env: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(env)}))


WHERE = """\
import os, sys, theirs
import slurmft
with slurmft.attach() as job:
    parent = open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")[0]
    print(theirs.word, sys.prefix, os.environ["VIRTUAL_ENV"], os.environ["PATH"].split(":")[0])
    print(job.rank, parent)
    job.step(1, total=1)
    job.result(score=1)
"""


@pytest.mark.parametrize(
    "words", [("where.py",), ("-m", "where"), ("python", "where.py")]
)
def test_program_has_its_own_python(here: Path, words: tuple[str, ...]) -> None:
    env = make_venv(here / "env")
    write(here, "where.py", WHERE)
    done = run("--env", "env", "--", *words)
    assert done.code == 0, done.out + done.err
    said = "\n".join(lines_of(done.run, 0))
    assert f"theirs {env} {env} {env}/bin\n0 {sys.executable}\n" in f"{said}\n"
    assert done.result["metrics"] == {"score": 1}


@pytest.mark.parametrize("backend", ["auto", "ccl"])
def test_oneccl_is_that_of_its_environment(here: Path, backend: str) -> None:
    """slurmft's own Python has none."""
    env = make_venv(here / "env")
    text = "import os; print(os.environ.get('FROM_SETVARS'), os.environ.get('{}'))"
    write(here, "x.py", text.format("CCL_ATL_TRANSPORT"))
    flags = ("--profile", "cpu", "--backend", backend, "--env", "env")
    done = run(*flags, "--", "x.py")
    if backend == "auto":
        assert lines_of(done.run, 0)[-1] == "None None"
    else:
        assert_two_lines(done, "oneccl_bindings_for_pytorch is not installed")
    stand_in(site(env), "2.8.0")
    torch = site(env) / "torch-2.8.0+cpu.dist-info"
    torch.mkdir()
    (torch / "METADATA").write_text("Name: torch\nVersion: 2.8.0+cpu\n")
    done = run(*flags, "--", "x.py")
    assert done.code == 0, done.out + done.err
    # One process has nothing to send, and auto nothing to measure.
    expected = {"auto": "None None", "ccl": "yes ofi"}
    assert lines_of(done.run, 0)[-1] == expected[backend]


def test_other_programs_have_its_path(here: Path) -> None:
    make_venv(here / "env")
    done = run("--env", "env", "--", "their-tool")
    assert done.code == 0, done.out + done.err
    assert lines_of(done.run, 0)[-1] == "theirs"


@pytest.mark.extra("environments")
def test_conda_environments_are_named_as_conda_does(here: Path) -> None:
    env = make_venv(here / "env")
    (env / "conda-meta").mkdir()
    write(
        here,
        "x.py",
        "import os; print(os.environ['CONDA_PREFIX'], 'VIRTUAL_ENV' in os.environ)",
    )
    done = run("--env", "env", "--", "x.py")
    assert done.code == 0, done.out + done.err
    assert lines_of(done.run, 0)[-1] == f"{env} False"


def test_slurmft_is_found_and_nothing_beside_it(here: Path) -> None:
    """By an environment that does not have it, and only because the job's shim is on the path."""
    env = make_venv(here / "env")
    beside = Path(package.__file__).parents[1]
    program = "import sys, slurmft, slurmft.job\n"
    program += f"assert {str(beside)!r} not in sys.path\nimport yaml"
    variables = locks.environment("auto", {})
    done = subprocess.run(
        [env / "bin" / "python", "-c", program],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert "No module named 'yaml'" in done.stderr
    assert "slurmft" not in done.stderr


def test_no_environment(here: Path) -> None:
    write(here, "x.py", "")
    assert_two_lines(
        run("--env", "nowhere", "--", "x.py", follow=False), "--env 'nowhere'"
    )
    assert_two_lines(run("--env", "uv", "--", "x.py", follow=False), "no uv.lock in")
    assert not (here / "runs").exists()


def test_dry_run_shows_it(here: Path) -> None:
    env = make_venv(here / "env")
    write(here, "x.py", "")
    write(here, "fsdp.yaml", FSDP)
    write(env, "lib/accelerate.py", "")
    done = run(
        "--dry-run", "--accelerate-config", "fsdp.yaml", "--", "x.py", follow=False
    )
    assert "Accelerate's variables: decided on the nodes, from " in done.out
    done = run("--dry-run", "--env", "env", "--", "x.py", follow=False)
    assert f"its environment: {env}; its Python: {env}/bin/python" in done.out


def test_packages_that_change_between_attempts(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = make_venv(here / "env")
    write(here, "x.py", "")
    config = submission.configure(["x.py"], {"env": "env"}, FLAGS)
    run_dir = RunDir.create(config)
    attempts.begin(run_dir, ["n1"], "7")
    attempt = run_dir.read_attempt()
    assert attempt
    assert not attempt.changed
    (site(env) / "theirs-1.0.dist-info").rename(site(env) / "theirs-1.1.dist-info")
    (site(env) / "more-2.dist-info").mkdir()
    capsys.readouterr()
    attempts.begin(run_dir, ["n1"], "7", restarts=1)
    told = "changed since submission: more (none -> 2, from attempt 2 on), theirs (1.0 -> 1.1, from"
    assert told in capsys.readouterr().err
    attempts.begin(run_dir, ["n1"], "7", restarts=2)
    assert "changed" not in capsys.readouterr().err  # once
    recorded = json.loads(run_dir.packages.read_text())
    assert recorded == {"1": {"theirs": "1.0"}, "2": {"theirs": "1.1", "more": "2"}}
    known = json.loads(run_dir.attempt.read_text())["changed"]
    assert known["theirs"] == "1.0 -> 1.1, from attempt 2 on"
    run_dir.packages.write_text('{"1": "damaged"}')
    attempts.begin(run_dir, ["n1"], "7", restarts=3)
    assert list(json.loads(run_dir.packages.read_text())) == ["4"]


def test_packages_of_a_training() -> None:
    """As importlib.metadata has them, which is slower."""
    found = fingerprint.packages(sys.executable)
    assert found["torch"] == importlib.metadata.version("torch")
    assert found.keys() >= {"accelerate", "numpy", "pytest"}
    assert fingerprint.packages("/nowhere/python") == {}


# --- uv -------------------------------------------------------------------------------------------


@pytest.fixture
def project(here: Path) -> Path:
    """A project with a uv.lock, and a program in a folder of it."""
    pytest.importorskip("uv", reason="uv is not installed: pip install uv")
    write(here, "pyproject.toml", "[project]\nname = 'demo'\nversion = '1'\n")
    lock = "version = 1\nrequires-python = '>=3.11'\n\n[[package]]\nname = 'demo'\n"
    write(here, "uv.lock", lock + "version = '1'\nsource = { virtual = '.' }\n")
    (here / "scripts").mkdir()
    write(here / "scripts", "prefix.py", "import sys; print(sys.prefix)")
    return here


@pytest.mark.extra("environments")
def test_environment_of_a_lock_is_made_once(project: Path) -> None:
    dry = run("--env", "uv", "--dry-run", "--", "scripts/prefix.py", follow=False)
    assert dry.code == 0, dry.err
    assert not (project / "runs").exists()
    done = run("--env", "uv", "--", "scripts/prefix.py")
    assert done.code == 0, done.out + done.err
    (made,) = (p for p in (project / "runs").glob(".envs-*/*") if p.is_dir())
    assert lines_of(done.run, 0)[-1] == str(made)
    assert f"its environment: {made};" in dry.out
    assert "uv sync of" in done.err
    again = run("--env", "uv", "--", "scripts/prefix.py")
    assert again.code == 0
    assert "uv sync of" not in again.err


@pytest.mark.extra("environments")
def test_two_at_once_make_one(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job, found = JobConfig(runs_dir=str(project / "runs")), []
    make = lambda: found.append(environment.folder("uv", project, job, make=True))  # noqa: E731
    code = (
        "import pathlib, sys; from slurmft.programs import environment as o; "
        "from slurmft.core.config import JobConfig as J; "
        "print(o.folder('uv', pathlib.Path.cwd(), J(runs_dir=sys.argv[1]), True))"
    )
    command = [sys.executable, "-c", code, job.runs_dir]
    other = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    thread = threading.Thread(target=make)
    thread.start()
    out, err = other.communicate(timeout=PATIENCE_S)
    thread.join()
    assert [out.strip()] == found
    assert other.returncode == 0, err + capfd.readouterr().err
    assert os.access(f"{found[0]}/bin/python", os.X_OK)
    # and nothing beside it
    names = {Path(found[0]).name, MARK}
    assert set(os.listdir(Path(found[0]).parent)) == names


@pytest.mark.extra("environments")
def test_environment_that_others_could_write_is_refused(project: Path) -> None:
    job = JobConfig(runs_dir=str(project / "runs"))
    environment.folder("uv", project, job, make=True)
    (folder,) = (project / "runs").glob(".envs-*")
    folder.chmod(0o777)
    with pytest.raises(NotOwnError, match="others can write"):
        environment.folder("uv", project, job, make=True)


@pytest.mark.extra("environments")
def test_lock_that_uv_refuses(project: Path) -> None:
    write(project, "uv.lock", "version = 'x'\n")
    with pytest.raises(UsageError, match="uv sync failed"):
        environment.folder(
            "uv", project, JobConfig(runs_dir=str(project / "runs")), True
        )


@pytest.mark.extra("environments")
def test_another_lock_is_another_environment(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobConfig(runs_dir=str(project / "runs"))
    first = environment.folder("uv", project, job, make=False)
    with monkeypatch.context() as changed:
        changed.setenv("UV_NO_DEV", "1")
        assert environment.folder("uv", project, job, make=False) != first
    assert environment.folder("uv", project, job, make=False) == first
    with open(project / "uv.lock", "a") as file:
        file.write("# changed\n")
    assert environment.folder("uv", project, job, make=False) != first


def test_uv_imports_nothing_from_the_path_of_the_user(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write into a folder of PYTHONPATH; and what is built does not depend on it."""
    write(here, "pyproject.toml", "")
    write(here, "uv.lock", "")
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nenv >>{tmp_path}/variables\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:relative")
    job = JobConfig(runs_dir=str(here / "runs"))
    environment.folder("uv", here, job, make=True)
    variables = (tmp_path / "variables").read_text()
    assert variables.count("UV_PROJECT_ENVIRONMENT=") == 1
    assert "PYTHONPATH" not in variables


@pytest.mark.extra("environments")
def test_without_uv(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(interpreter, "PYTHON", "/nowhere/python")
    with pytest.raises(UsageError, match="there is no uv"):
        environment.folder("uv", project, JobConfig(), make=False)
