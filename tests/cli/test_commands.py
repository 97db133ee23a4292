"""The commands of the login node: fast to start, free of torch, and clear about mistakes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import slurmft as slurmft_package
from slurmft import Run
from slurmft.__main__ import console
from slurmft.cli import run, status
from slurmft.cli.commands import load_command, usage
from slurmft.cli.hints import on_cluster, pasted, typed
from slurmft.cli.parser import first_clause, wrapped
from slurmft.core import git, plugins
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.options import flag, options
from slurmft.runs import resolve
from slurmft.runs.rundir import RunDir
from slurmft.train.commands import submit
from tests.conftest import HOSTILE, assert_two_lines, slurmft
from tests.support import PATIENCE_S
from tests.support.made_runs import write_run

pytestmark = pytest.mark.processes

HEAVY = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "numpy",
    "submitit",
    "pyarrow",
)


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        (["--help"], "SystemExit(0)"),
        (["--dry-run"], "0"),
        (["--dry-run", "--cluster=slurm"], "0"),
        (["--nods"], "UsageError(\"unknown flag '--nods'\")"),
    ],
)
def test_no_heavy_imports(
    arguments: list[str], ending: str, fake_sbatch: dict[str, str]
) -> None:
    code = (
        "import sys\n"
        "from slurmft.train.commands.submit import main\n"
        "try: ending = repr(int(main(sys.argv[1:])))\n"
        "except BaseException as error: ending = repr(error)\n"
        "print(ending)\n"
        f"print('HEAVY', [m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=fake_sbatch,
        check=True,
    )
    assert done.stdout.splitlines()[-2:] == [ending, "HEAVY []"]


MPIRUN = (
    "--cluster",
    "mpirun",
    "--nproc-per-node",
    "1",
    "--hostfile",
    "{folder}/hosts",
)


@pytest.fixture
def fake_sbatch(tmp_path: Path) -> dict[str, str]:
    """An environment with an sbatch that must not be called."""
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 77\n")
    tool.chmod(0o755)
    return os.environ | {"PATH": f"{tool.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--ndoes", "4"], "did you mean --nodes?"),
        (["--nodes", "0"], "--nodes 0 must be between 1 and 65,536"),
        (
            ["--nodes", "four"],
            "argument --nodes: 'four' is neither a whole number nor a range",
        ),
        (
            ["--batch-size", "auot"],
            "argument --batch-size: 'auot' is not a whole number, or auto",
        ),
        (["--eval-batch-size", "auto"], "'auto' is not a whole number"),
        (["--node", "4"], "did you mean --nodes?"),
        (["--task", "emotions"], "did you mean emotion?"),
        (["--task-option=--"], "argument --task-option: '--' is no value"),
        (["--model=--"], "argument --model: '--' is no value"),
        (["--account", ""], "--account '' is empty"),
        (["--runs-dir", ""], "--runs-dir '' is empty"),
        (
            ["--nodes", "99999999999"],
            "--nodes 99999999999 must be between 1 and 65,536",
        ),
        (["--doc-stride", "-1"], "--doc-stride -1 must be 0 or more"),
        (["4"], "unexpected argument '4'"),
        (["--task", "emotion", "--data", "/no/such/place"], "no such folder"),
        (["--task", "emotion", "--model", "/"], "holds no config.json"),
        (["--cluster", "slurm"], "sbatch is not on the PATH"),
        (["--runs-dir", "/proc/none"], "cannot write the run directory"),
        (["--comment", "two\nlines"], "holds a line break"),
        (["--mem", "abc"], "write it as 64G or 900M"),
    ],
)
def test_mistakes_end_in_two_lines(
    arguments: list[str], hint: str, tmp_path: Path
) -> None:
    done = slurmft("submit", *arguments, env={"PATH": f"{tmp_path}"})
    assert done.code in (2, 3)
    assert hint in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 2
    assert done.out == ""


@pytest.mark.parametrize(
    ("hosts", "arguments", "fact"),
    [
        ("", ["submit", "--task", "mrcp"], "unknown --task 'mrcp'"),
        ("# n1\n", ["submit", *MPIRUN], "names no host"),
        (None, ["submit", *MPIRUN], "cannot be read: No such file"),
        (
            "",
            ["doctor", "node", "--here", "--nproc-per-node", "4000"],
            "--nproc-per-node 4000, but",
        ),
        (
            "",
            ["doctor", "node", "--here", "--profile", "gpu"],
            "looked at CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_mistakes_name_fact_and_cure(
    hosts: str | None, arguments: list[str], fact: str, tmp_path: Path
) -> None:
    if hosts is not None:
        (tmp_path / "hosts").write_text(hosts)
    filled = [a.format(folder=tmp_path) for a in arguments]
    assert_two_lines(slurmft(*filled, env={"CUDA_VISIBLE_DEVICES": ""}), fact)


@pytest.mark.parametrize(
    "name",
    [*plugins.entries(plugins.COMMANDS), "study run", "study status", "doctor node"],
)
def test_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a wide terminal: long lines are hard to read."""
    monkeypatch.setenv("COLUMNS", "200")
    for words in (["help", *name.split()], [*name.split(), "--help"]):
        done = slurmft(*words)
        assert done.code == 0
        assert "usage: slurmft" in done.out
        assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize(
    "name",
    [*plugins.entries(plugins.COMMANDS), "study run", "render kubernetes"],
)
@pytest.mark.parametrize("columns", [60, 80])
def test_help_begins_with_examples(
    name: str,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And is short: who wants all flags asks for them."""
    monkeypatch.setenv("COLUMNS", str(columns))
    command, *rest = name.split()
    with contextlib.suppress(SystemExit):
        load_command(command).main([*rest, "--help"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= {60: 60, 80: 50}[columns]
    assert max(map(len, lines)) < columns
    if "\noptions:" in text and "examples" in text:
        assert text.index("\nexamples") < text.index("\noptions:")
    # No flag is broken at its hyphens.
    assert not [line for line in lines if re.search(r" -?-[a-z-]*-$", line)]
    # Nor from its value, in an example of several lines.
    assert not re.search(r" --[a-z-]+ \\\n +[^- ]", text)


@pytest.mark.parametrize("columns", [60, 80])
def test_list_of_commands_fits(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = usage().splitlines()
    assert max(map(len, lines)) < columns
    assert len(lines) <= 46
    assert any(line.startswith("--on CLUSTER") for line in lines)


def test_value_in_quotes_stays_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is broken within would be another value."""
    monkeypatch.setenv("COLUMNS", "60")
    example = (
        "  slurmft run --nodes 2 --partition gpu --setup 'module load cuda' -- a.py"
    )
    assert wrapped(f"examples:\n{example}").splitlines()[1:] == [
        "  slurmft run --nodes 2 --partition gpu \\",
        "      --setup 'module load cuda' -- a.py",
    ]


@pytest.mark.parametrize("command", [submit, run])
def test_help_shows_the_usual_flags(command: Any) -> None:
    usual = [name for name, each in options(JobConfig).items() if each.usual]
    assert len(usual) == 9
    short = slurmft("help", command.parser().prog.split()[1]).out
    whole = slurmft(command.parser().prog.split()[1], "--help-all").out
    for field in options(JobConfig):
        line = re.compile(rf"^  {flag(field)}[ ,]", re.MULTILINE)
        assert bool(line.search(short)) == (field in usual)
        assert line.search(whole)
    assert "examples:" in short
    assert "examples:" in whole


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("number of nodes; each has a task (default: 1)", "number of nodes (default: 1)"),
        ("what to train: emotion, cola (default: synthetic)", "what to train (default: synthetic)"),
        ("processes a node (default: one a GPU; without GPUs one a CPU)", "processes a node"),
        ("column that holds the text", "column that holds the text"),
    ],
)  # fmt: skip
def test_first_clause_of_a_help_text(text: str, clause: str) -> None:
    assert first_clause(text) == clause


@pytest.mark.parametrize("command", [submit, run])
def test_short_help_has_no_half_texts(command: Any) -> None:
    """The first clause of each text stands by itself."""
    parser = command.parser()
    for each in parser.arguments():
        if each.help == argparse.SUPPRESS or each.dest in parser.hidden:
            continue
        clause, _, _ = first_clause(each.help).partition(" (default")
        assert len(clause.split()) > 1, each.help
        assert clause.count("`") % 2 == 0, each.help


def test_json_of_a_submission(tmp_path: Path) -> None:
    """And of a dry run, and of a resume that is only shown."""
    flags = ("--cluster", "local", "--max-steps", "2000", "--runs-dir", str(tmp_path))
    unread = ("--optimizer", "adamw", "--muon-learning-rate", "0.02", "--mem", "3G")
    submission = slurmft("submit", *flags, *unread, "--dry-run", "--json")
    assert submission.err.splitlines() == [
        "warning: --muon-learning-rate 0.02 has no effect with --optimizer adamw",
        "warning: --mem 3G has no effect with --cluster local",
    ]
    dry = json.loads(submission.out)
    assert dry["program"]["settings"]["max_steps"] == 2000
    assert list(tmp_path.iterdir()) == []
    both = slurmft("submit", *flags, "--json", "--follow")
    assert_two_lines(both, "--follow: not allowed with argument --json")
    found = json.loads(slurmft("submit", *flags, "--json", "--name", "mine").out)
    made = RunDir.open(found["run"])
    assert found == {
        "run": str(made.path), "name": made.path.name, "job": made.job_id(),
        "cluster": "local",
    }  # fmt: skip
    assert re.fullmatch(r"mine-\d{8}-\d{6}-[0-9a-f]{6}", made.path.name)
    slurmft("cancel", "mine", "--runs-dir", str(tmp_path))
    with pytest.raises(SlurmftError):
        Run(made.path).wait(PATIENCE_S)
    before = {path: path.read_bytes() for path in (made.config, made.state, made.job)}
    where = ("mine", "--runs-dir", str(tmp_path))
    shown = slurmft("resume", *where, "--nodes", "2", "--dry-run")
    assert shown.code == 0, shown.err
    for text in ("# would resume from ", '"nodes": 2', str(made.path), "dry run"):
        assert text in shown.out
    as_json = json.loads(slurmft("resume", *where, "--dry-run", "--json").out)
    assert as_json == {
        "run": str(made.path),
        "job": None,
        "checkpoint": made.newest_checkpoint(),
    }
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize(
    ("program", "words", "found"),
    [
        (
            "/usr/bin/slurmft",
            ["python3", "/usr/bin/slurmft", "list"],
            ["/usr/bin/slurmft"],
        ),
        (".venv/bin/slurmft", ["python3", ".venv/bin/slurmft"], [".venv/bin/slurmft"]),
        ("/x/slurmft/__main__.py", ["py", "-m", "slurmft"], ["py", "-m", "slurmft"]),
        (
            "/x/slurmft/submit.py",
            ["../py", "-m", "slurmft.submit"],
            ["../py", "-m", "slurmft"],
        ),
        ("notebook", ["notebook"], ["slurmft"]),
    ],
)
def test_next_commands_are_as_typed(
    program: str, words: list[str], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setenv("PATH", "/nowhere")  # a venv may be active
    assert typed() == found


def test_next_commands_of_a_run_below_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are short, and what they name is found from there."""
    made = write_run(
        tmp_path / "elsewhere" / "a-20261120-093012-a1b2c3", state="failed"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    assert status.main(["a", "--runs-dir", "elsewhere"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith(" follow elsewhere/a-20261120-093012-a1b2c3")
    assert resolve.find(line.split()[-1]).path == made.path
    monkeypatch.chdir("/")
    assert pasted(made.path) == str(made.path)[1:]
    assert pasted(Path("-x/y").absolute()) == "/-x/y"


def test_names_of_runs(tmp_path: Path) -> None:
    for name in ("a", "a-b", "a-b"):
        write_run(
            tmp_path / f"{name}-20261120-09301{len(list(tmp_path.iterdir()))}-a1b2c3"
        )
    assert resolve.find("a", tmp_path).path.name == "a-20261120-093010-a1b2c3"
    with pytest.raises(UsageError, match="2 runs are called 'a-b'") as error:
        resolve.find("a-b", tmp_path)
    assert "one of: a-b-20261120-093012-a1b2c3, a-b-20261120-093011" in str(error.value)


@pytest.mark.parametrize(
    "name", ["last", "12", "a b", "../x", "-a", "a-20261120-093012", "", "é"]
)
def test_names_that_mean_something_else(name: str, tmp_path: Path) -> None:
    assert_two_lines(slurmft("submit", "--name", name), "cannot be the name of a run")


def test_commands() -> None:
    assert slurmft().code == 2
    for words in (["help"], ["--help-all"], ["help", "--help-all"]):
        assert slurmft(*words).out == slurmft("--help").out
    assert "submit" in slurmft("--help").out
    assert "did you mean submit?" in slurmft("submt").err
    assert "is not a run directory" in slurmft("follow", "/").err
    assert slurmft("--version").out.startswith("slurmft 0.")


def test_dry_run_shows_everything_and_does_nothing(
    tmp_path: Path, fake_sbatch: dict[str, str]
) -> None:
    runs = tmp_path / HOSTILE
    done = slurmft(
        *("submit", "--dry-run", "--nodes", "3", "--runs-dir", str(runs)),
        *(
            "--partition",
            "gpu",
            "--gpus-per-node",
            "4",
            "--cpus-per-task",
            "8",
            "--exclusive",
        ),
        *("--setup", "module load cuda", "--sbatch", "nice=100", "--comment", "it's"),
        env=fake_sbatch,
    )
    assert done.code == 0
    # What everybody looks for is on the screen when all has been printed: at the end.
    end = done.out.splitlines()[-8:]
    assert end[:4] == [
        "# what would be submitted",
        "  what     synthetic",
        "  where    Slurm: 3 node(s), partition gpu",
        "  time     the limit of the partition (--time)",
    ]
    assert end[4].startswith("  a node   4 GPU(s); all CPUs; a process")
    assert end[6:] == ["", "dry run: nothing was submitted"]
    for text in (
        '"batch_size": 32',
        "#SBATCH --nodes=3",
        "#SBATCH --partition=gpu",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --exclusive\n",
        "#SBATCH --nice=100",
        "module load cuda\n",
        "-m slurmft.node.torchrun --nnodes 3",
        "nothing was submitted",
    ):
        assert text in done.out
    assert not runs.exists()


@pytest.mark.parametrize("columns", ["1", "7", "60"])
def test_narrow_terminal(columns: str, tmp_path: Path) -> None:
    """Some report one column, or none."""
    for command in (["run", "--help"], ["list", "--runs-dir", str(tmp_path)]):
        done = slurmft(*command, env={"COLUMNS": columns})
        assert done.code == 0
        assert "Traceback" not in done.err


def test_standard_output_that_is_closed(tmp_path: Path) -> None:
    """What is opened later would get its number, and what is printed."""
    command = shlex.join([sys.executable, "-m", "slurmft", "list", "--json"])
    done = subprocess.run(
        ["sh", "-c", f"{command} --runs-dir {shlex.quote(str(tmp_path))} >&- 2>&-"],
        check=False,
    )
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_working_folder_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = shlex.join([sys.executable, "-m", "slurmft", "list"])
    done = subprocess.run(
        ["sh", "-c", f"cd {shlex.quote(str(folder))} && rmdir . ../gone; {command}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.endswith(
        "error: the working folder has been removed\nhint: change to another one: cd\n"
    )


def test_machine_without_proc(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_folder = os.path.isdir
    monkeypatch.setattr(
        os.path, "isdir", lambda path: path != "/proc/self/fd" and is_folder(path)
    )
    assert console(["list"]) == 2
    assert capsys.readouterr().err.startswith("error: /proc is not mounted here: ")


@pytest.mark.parametrize("name", [*plugins.entries(plugins.COMMANDS), "study run"])
def test_every_command_has_help_all(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        command, *rest = name.split()
        load_command(command).main([*rest, "--help-all"])
    assert "usage: slurmft" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["list", "--json", "--state", "asleep"], 2),
        (["status", "nobody", "--json"], 2),
        (["submit", "--json", "--task", "emotions"], 2),
        (["run", "--json", "--", "no-such-program.py"], 2),
        (["logs", "nobody", "--json"], 2),
        (["cancel", "nobody", "--json"], 2),
        (["clean", "--json", "--runs-dir", "/no/such/place"], 2),
        (["data", "/no/such/place", "--json"], 2),
        (["report", "/no/such/place", "--json"], 2),
        (["plan", "/no/such/place", "--json"], 2),
        (["doctor", "--json", "--backend", "none"], 2),
        (["study", "status", "/no/such/place", "--json"], 2),
    ],
)
def test_failure_as_json(
    command: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs read one object, whatever comes; people read the same on stderr."""
    monkeypatch.chdir(tmp_path)
    done = slurmft(*command)
    assert done.code == code
    (name,) = json.loads(done.out)
    facts = json.loads(done.out)[name]
    assert name == "error"
    assert facts["exit_code"] == code
    assert done.err.startswith(f"error: {facts['message']}")
    if facts["hint"] is not None:
        assert facts["hint"] in done.err


def test_flags_of_a_program_ask_slurmft_for_nothing() -> None:
    done = slurmft("run", "--", "no-such-program.py", "--json", "--debug")
    assert done.code == 2
    assert done.out == ""
    assert "Traceback" not in done.err


def test_version_of_a_checkout_that_was_never_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slurmft.__version__", slurmft_package.UNKNOWN_VERSION)
    monkeypatch.setattr(
        git, "head", lambda folder: git.Commit("0123456789abcdef", True)
    )
    assert console(["--version"]) == 0
    expected = "slurmft 0+unknown (never installed; commit 012345678, with changes)\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("cluster", ["lab", "my lab", r"\1"])
def test_hints_of_a_command_that_came_from_a_laptop(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "look: slurmft status /r/a; slurmft help sites; slurmft run -- train.py"
    assert on_cluster(hint) == hint
    monkeypatch.setenv("SLURMFT_ON", cluster)
    typed_there = on_cluster(hint)
    look, page, run = typed_there.split("; ")
    there = ["slurmft", "--on", cluster]
    assert shlex.split(look)[1:] == [*there, "status", "/r/a"]
    # Pages are here, too.
    assert page == "slurmft help sites"
    assert shlex.split(run) == [*there, "run", "--", "train.py"]


def test_errors_of_a_command_that_came_from_a_laptop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "a", state="failed")
    monkeypatch.setenv("SLURMFT_ON", "lab")
    assert console(["push", str(run.path), "me/x"]) == 2
    assert f"slurmft --on lab resume {run.path}" in capsys.readouterr().err
