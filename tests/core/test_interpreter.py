"""What slurmft's own processes import: nothing from the folder in which they are started."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.core import interpreter
from slurmft.node.torchrun import rank_arguments
from slurmft.programs.kind import arguments
from tests.conftest import Done

pytestmark = pytest.mark.processes

REPOSITORY = Path(interpreter.__file__).parents[2]
CONSOLE = [str(Path(sys.executable).with_name("slurmft"))]
MODULE = [sys.executable, "-m", "slurmft"]


def start(folder: Path, *command: str, **variables: str) -> Done:
    """Runs a command in a folder."""
    environment = {
        name: value for name, value in os.environ.items() if "PYTHON" not in name
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | {"PYTHONDONTWRITEBYTECODE": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def output(folder: Path, *command: str, **variables: str) -> str:
    """What a command prints that must succeed."""
    done = start(folder, *command, **variables)
    assert done.code == 0, done.err
    return done.out


def module_names() -> set[str]:
    """The names of all modules that can be imported here, at the top."""
    names = set(sys.stdlib_module_names)
    for distribution in importlib.metadata.distributions():
        for path in distribution.files or []:
            names.add(path.parts[0].removesuffix(".py"))
    return {name for name in names if name.isidentifier()} - {"slurmft"}


def plant(folder: Path) -> Path:
    """Puts a module of every name into a folder, but for those that Python itself imports before
    it runs a module; returns the file to which each adds its name when it is imported."""
    folder.mkdir()
    (folder / "probe.py").write_text("import sys; print(*sys.modules)")
    before = output(folder, sys.executable, "-m", "probe").split()
    seen = folder.parent / "seen"
    seen.touch()
    text = f"open({str(seen)!r}, 'a').write(__name__ + ' ')\n"
    for name in module_names() - set(before):
        (folder / f"{name}.py").write_text(text)
    return seen


@pytest.mark.parametrize(
    "words",
    [
        ["submit", "--task", "synthetic", "--cluster", "local", "--dry-run"],
        ["run", "--cluster", "local", "--dry-run", "--", "../elsewhere/program.py"],
        ["list", "--runs-dir", ".."],
        ["doctor", "node", "--here"],
        ["study", "--help"],
        ["completion", "bash"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("typed", [MODULE, CONSOLE], ids=["-m", "console"])
def test_commands_import_nothing_from_the_present_folder(
    tmp_path: Path, words: list[str], typed: list[str]
) -> None:
    seen = plant(tmp_path / "here")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "program.py").touch()
    output(tmp_path / "here", *typed, *words)
    assert seen.read_text() == ""


@pytest.mark.parametrize("path", ["", ".", "sub/..", "/nowhere:"])
def test_relative_entries_of_the_path_are_left_out(tmp_path: Path, path: str) -> None:
    """`export PYTHONPATH=/nowhere:$PYTHONPATH` makes an empty entry."""
    for name in ("json", "psutil", "shtab", "submitit"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    (tmp_path / "sub").mkdir()
    variables = {"PYTHONPATH": path}
    output(tmp_path, *MODULE, "list", "--runs-dir", ".", **variables)
    look = "import sys, slurmft; print(sys.path)"
    own = output(tmp_path, *interpreter.code(look), **variables)
    assert str(tmp_path) not in json.loads(own.replace("'", '"'))
    # They are the user's: other programs have them.
    plain = output(tmp_path, sys.executable, "-c", look, **variables)
    assert (str(tmp_path) in plain) == bool(path)


@pytest.mark.parametrize("path", ["", ".", "lib:", ":/nowhere", "/nowhere:lib:/no"])
def test_libraries_have_no_relative_entries(path: str) -> None:
    variables = {"PYTHONPATH": path, "HOME": "/home"}
    absolute = [entry for entry in path.split(":") if entry.startswith("/")]
    environment = interpreter.library_environment(variables)
    assert environment.pop("PYTHONPATH", "") == ":".join(absolute)
    assert environment == {"HOME": "/home"}
    command = interpreter.with_path_of(variables, ["program"])
    assert command == ["env", f"PYTHONPATH={path}", "program"]
    absolute_alone = {"PYTHONPATH": "/nowhere:/no"}
    assert interpreter.library_environment(absolute_alone) == absolute_alone
    for unchanged in ({}, absolute_alone):
        assert interpreter.with_path_of(unchanged, ["program"]) == ["program"]


def test_what_is_no_module_of_slurmft_has_no_relative_entries() -> None:
    """Nothing else would take them off its path."""
    seen = set()
    for path in (REPOSITORY / "slurmft").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func)
            first = ast.unparse(node.args[0])
            is_foreign = name.startswith("interpreter.foreign_") or (
                name == "interpreter.script"
            )
            is_library = name == "interpreter.module" and (
                first.startswith(("'submitit", "'conda", "'torch"))
            )
            if is_foreign or is_library:
                seen.add(path.name)
                assert "library_environment(" in text, path
    assert {"local.py", "pack.py", "fingerprint.py", "collectives.py"} <= seen


def test_a_job_on_this_machine_imports_libraries_from_no_relative_entry(
    tmp_path: Path,
) -> None:
    """Its program does, as plain Python would have it."""
    (tmp_path / "lib").mkdir()
    for folder in (tmp_path, tmp_path / "lib"):
        (folder / "submitit.py").write_text("raise SystemExit('imported')")
    (tmp_path / "lib" / "of_user.py").write_text("print('module of the user')")
    (tmp_path / "program.py").write_text("import of_user")
    words = ["run", "--cluster", "local", "--snapshot", "none", "--follow"]
    printed = output(
        tmp_path,
        *CONSOLE,
        *words,
        "--",
        "program.py",
        PYTHONPATH="lib:",
        HOME=str(tmp_path),
    )
    assert "module of the user" in printed


def test_an_absolute_entry_stays(tmp_path: Path) -> None:
    look = "import sys, slurmft; print(sys.path[0])"
    path = f"{tmp_path}:."
    assert output(tmp_path, *interpreter.code(look), PYTHONPATH=path) == f"{tmp_path}\n"


def test_modules_of_others_keep_the_folder(tmp_path: Path) -> None:
    """That which imports slurmft is the user's program."""
    (tmp_path / "mine.py").write_text("import sys, slurmft; print(sys.path[0])")
    (tmp_path / "slurmft_like.py").write_text("import mine")
    for command in (["-m", "mine"], ["-um", "slurmft_like"], ["mine.py"]):
        printed = output(tmp_path, sys.executable, *command)
        assert printed == f"{tmp_path}\n"
    printed = output(tmp_path, sys.executable, "-c", "import mine")
    assert printed == "\n"


def test_a_checkout_that_was_never_installed_works(tmp_path: Path) -> None:
    """There, slurmft itself is found in the present folder alone: what it starts finds it, too."""
    (tmp_path / "slurmft").symlink_to(REPOSITORY / "slurmft")
    packages = Path(importlib.metadata.__file__).parent
    look = (
        "import os, sys; from slurmft.core import interpreter; sys.argv = ['-m']\n"
        "sys.orig_argv = ['python', '-m', 'slurmft']\n"
        "interpreter.leave_out_present_folder()\n"
        "print(sys.path.index(os.getcwd()) > 0, os.environ['PYTHONPATH'] == os.getcwd())"
    )
    assert packages
    command = [
        sys.executable,
        "-S",
        "-c",
        f"import sys; sys.path[0] = {str(tmp_path)!r}; {look}",
    ]
    assert output(tmp_path, *command) == "True True\n"


# --- commands -------------------------------------------------------------------------------------


def test_commands_for_a_python_of_any_version(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    (tmp_path / "mine.py").write_text("import sys, json; print(sys.argv, __name__)")
    script = tmp_path / "there" / "script.py"
    script.parent.mkdir()
    script.write_text("import sys, json; print(sys.argv[1:], __name__)")
    (script.parent / "json.py").write_text("raise SystemExit('imported')")
    own = tmp_path / "other"
    own.mkdir()
    code = interpreter.foreign_code(sys.executable, "import json; print(json.dumps(1))")
    assert output(tmp_path, *code) == "1\n"
    command = interpreter.foreign_script(sys.executable, str(script), "-m", "x y")
    assert output(tmp_path, *command) == "['-m', 'x y'] __main__\n"
    assert output(tmp_path, *interpreter.script(str(script), "a")) == "['a'] __main__\n"


@pytest.mark.parametrize("knows_option", [True, False])
def test_module_that_does_not_import_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_option: bool
) -> None:
    """Its frozen copy is on the path; -P is not known before Python 3.11."""
    monkeypatch.setattr(interpreter, "knows_safe_path", lambda python: knows_option)
    copy = tmp_path / "copy"
    for folder in (copy, tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text(
            "import os, sys; print(os.path.dirname(__file__), sys.argv[1:], __name__)"
        )
    argv = [sys.executable, "-u", "-m", "mine", "--lr", "-m"]
    command = interpreter.without_folder(argv)
    printed = output(tmp_path, *command, PYTHONPATH=str(copy))
    assert printed == f"{copy} ['--lr', '-m'] __main__\n"
    assert interpreter.with_folder(command) == argv
    assert interpreter.with_folder(argv) == argv
    # In reports it is the program that was submitted.
    assert arguments({"argv": command}) == arguments({"argv": argv})


def test_which_pythons_know_the_option(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    assert interpreter.knows_safe_path(sys.executable)
    # The program says it when it is started.
    assert interpreter.knows_safe_path(str(tmp_path / "absent"))
    assert not interpreter.knows_safe_path(str(old))


def test_torchrun_starts_ranks_so() -> None:
    """As torch itself reads its arguments."""
    from torch.distributed.run import config_from_args, parse_args

    argv = ["--nproc-per-node", "2", "--module", "slurmft.train.rank", "/run"]
    _, command, arguments = config_from_args(
        parse_args(rank_arguments(argv))  # type: ignore[no-untyped-call, unused-ignore]
    )
    assert [command, *arguments] == interpreter.module(
        "slurmft.train.rank", "/run", unbuffered=True
    )
    assert rank_arguments(["script.py", "2"]) == ["script.py", "2"]


@pytest.mark.parametrize("path", ["", "lib:", "/nowhere"])
@pytest.mark.parametrize(
    "words", [["there/mine.py"], ["-m", "mine"], ["-P", "-m", "mine"]]
)
def test_the_program_of_an_integration_imports_as_plain_python_has_it(
    tmp_path: Path, words: list[str], path: str
) -> None:
    text = "import sys; print(sys.path, sys.argv[1:])"
    for folder in (tmp_path, tmp_path / "there", tmp_path / "lib"):
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text(text)
    variables = {"PYTHONPATH": f"{path}:{tmp_path}/lib"}
    if path:
        variables["PYTHONPATH"] = f"{tmp_path}/lib:{path}"
    flags = [word for word in words if word == "-P"]
    rest = [word for word in words if word != "-P"]
    runner = ["-m", "slurmft.plugins.integrations", "transformers"]
    plain = output(tmp_path, sys.executable, *words, "-x", **variables)
    command = [sys.executable, *flags, *runner, *rest, "-x"]
    assert output(tmp_path, *command, **variables) == plain


@pytest.mark.extra("environments")
def test_a_whole_job_imports_nothing_from_the_folder_of_its_submission(
    tmp_path: Path,
) -> None:
    """submitit's process, the tasks of nodes, torchrun and ranks."""
    seen = plant(tmp_path / "here")
    words = ["submit", "--cluster", "local", "--nodes", "2", "--follow"]
    output(
        tmp_path / "here", *MODULE, *words, "--task", "synthetic", "--max-steps", "2"
    )
    assert seen.read_text() == ""
    for words in (
        ["status"],
        ["logs", "last"],
        ["resume", "last"],
        ["report"],
        ["fetch", "--task", "synthetic"],
        ["predict", "last", "--data", "absent.csv"],
        ["study", "run", "absent.toml", "--dry-run"],
        ["clean", "--dry-run"],
    ):
        done = start(tmp_path / "here", *MODULE, *words)
        assert "Traceback" not in done.err, done.err
        assert seen.read_text() == "", words
