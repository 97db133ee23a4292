"""What commands print on a terminal, whoever wrote it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurmft.core.errors import SlurmftError
from slurmft.core.run_files import Failure
from slurmft.core.run_records import record_of
from slurmft.core.terminal import plain
from slurmft.show.progress import Progress
from tests.conftest import slurmft
from tests.support.made_runs import write_run

COMMANDS = (
    "\x1b]0;title\x07\x1b]52;c;Y3VybA==\x1b\\\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\"
    "\x1b[2J\x1b[1A\x9b2J\x9d0;title\x9c\x08\x08\x7f\r"
    "\u202egnp.exe\u2066\u200f\u2028\udcff"
)
"""Titles, the clipboard, links, cursors; C1; the direction of text; what is no UTF-8."""


def assert_plain(text: str) -> None:
    bad = {
        c
        for c in text
        if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t"
    }
    assert not bad, (bad, text)
    assert not set("\u202e\u2066\u200f") & set(text)


@given(st.text(st.characters(), max_size=50))
@example(COMMANDS)
def test_no_command_is_left(text: str) -> None:
    assert_plain(plain(text))
    assert plain(plain(text)) == plain(text)


@given(st.text(st.characters(), max_size=50))
@example(COMMANDS)
def test_json_says_the_same(text: str) -> None:
    assert json.loads(plain(json.dumps(text, ensure_ascii=False))) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc\r\n", "a\tb\nc\n"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b[2J", "\\u001b[2J"),
        ("é 漢字 שלום نمی‌خواهم 👩‍🔬", "é 漢字 שלום نمی‌خواهم 👩‍🔬"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_lines_above_a_bar() -> None:
    stream = io.StringIO()
    progress = Progress(stream, live=True)
    start = {
        "task": "t",
        "world_size": 1,
        "nodes": 1,
        "precision": "fp32",
        "backend": "gloo",
    }
    start |= {
        "global_batch_size": 1,
        "total_steps": 9,
        "parameters": 1,
        "event": "start",
    }
    for values in (start | {"task": COMMANDS}, {"event": "warning", "text": COMMANDS}):
        record = record_of(values)
        assert record is not None
        progress.show(record)
    progress.close()
    assert "\r" in stream.getvalue()  # the bar is there
    assert_plain(stream.getvalue().replace("\r", "").replace("\x1b[A", ""))


def test_errors_of_scripts(tmp_path: Path) -> None:
    assert str(SlurmftError("a\x1b[2J", "b\x9b")) == "a\\u001b[2J\nhint: b\\u009b"


@pytest.mark.processes
def test_names_and_contents_of_data(tmp_path: Path) -> None:
    """A column of a data file, a folder, a flag: in errors, and in help."""
    data = tmp_path / "da\x1b]0;x\x07ta"
    data.mkdir()
    for split in ("train", "validation"):
        (data / f"{split}.csv").write_text("te\x1b]0;x\x07xt,la\u202ebel\na,b\n")
    where = ("--task", "text-classification", "--data", str(data), "--dry-run")
    for flags in (where, (*where, "--text-column", "\x1b[2J"), ("--ta\x9bsk", "x")):
        done = slurmft("submit", *flags)
        assert done.code == 2
        assert_plain(done.err)


@pytest.mark.processes
@pytest.mark.parametrize(
    "command", [("status",), ("logs",), ("logs", "--json"), ("status", "--json"), ("report",),
                ("watch",), ("follow",), ("resume",)],
)  # fmt: skip
def test_what_a_run_says(tmp_path: Path, command: tuple[str, ...]) -> None:
    run = write_run(
        tmp_path / "runs" / f"a{COMMANDS[:3]}", state="failed", model=COMMANDS[:-1]
    )
    evil = COMMANDS[:-1]
    run.set_state("submitted")
    run.set_state("failed", evil, 1, checkpoint=evil)
    run.add(
        Failure.of(f"rank {evil[:8]}", SlurmftError(evil, evil), traceback=evil, step=3)
    )
    found = json.loads(next(run.failures.glob("*.json")).read_text())
    for path in run.failures.glob("*.json"):
        path.write_text(json.dumps(found | {"message": evil, "hint": evil}))
    with run.records.open("a") as file:
        file.write(
            json.dumps({"event": "warning", "text": evil, "time": 1.0, "rank": 0})
            + "\n"
        )
    run.rank_log(0).write_bytes(f"a line {evil}\n\n".encode() + b"\xff\x9b2J\n")
    told = {"cluster": "local", "id": "4194305"}  # above all process ids
    run.job.write_text(json.dumps(told))
    done = slurmft(command[0], str(run.path), *command[1:])
    assert_plain(done.out + done.err)
    assert "Traceback" not in done.err
    if "--json" in command and command[0] == "status":
        assert json.loads(done.out)["history"][-1]["reason"] == evil
    done = slurmft("list", "--runs-dir", str(tmp_path / "runs"))
    # Where `resume` could submit it, its job is anywhere between its start and its end.
    assert command[0] == "resume" or "failed" in done.out
    assert_plain(done.out)


_COMMANDS = [["list"], ["help", "tasks"], ["status", "none", "--json"]]
"""A few characters, which Python keeps until its end; more than it keeps; an error."""


@pytest.mark.processes
@pytest.mark.parametrize("words", _COMMANDS)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads(
    words: list[str], unbuffered: str, tmp_path: Path
) -> None:
    """As in `slurmft list | head -0`: no word about it, and the code of a SIGPIPE."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = _run(words, write_end, unbuffered, tmp_path)
    os.close(write_end)
    if "none" in words:
        assert done.returncode == 2
        assert done.stderr.startswith("error: no run in")
        assert done.stderr.count("\n") == 2
        return
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.processes
@pytest.mark.parametrize("words", _COMMANDS)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_on_a_full_disk(
    words: list[str], unbuffered: str, tmp_path: Path
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    done = _run(words, full, unbuffered, tmp_path)
    os.close(full)
    if "none" in words:
        assert done.returncode == 2
        assert done.stderr.startswith("error: no run in")
        assert done.stderr.count("\n") == 2
        return
    assert done.returncode == 1
    problem, hint = done.stderr.splitlines()
    assert problem.startswith("error: standard output cannot be written: No space")
    assert hint == "hint: write it to another place"


def _run(
    words: list[str], stdout: int, unbuffered: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    if not (folder / "runs").exists():
        write_run(folder / "runs" / "a")
    command = [sys.executable, "-m", "slurmft", *words]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment,
        text=True,
        check=False,
    )
