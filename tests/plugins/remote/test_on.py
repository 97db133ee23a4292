"""Commands that are typed on a laptop and run on a cluster, by a real sshd."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import assert_two_lines, slurmft
from tests.plugins.remote.conftest import Laptop, until
from tests.support import CHECKOUT, PATIENCE_S

pytestmark = [pytest.mark.processes, pytest.mark.extra("remote")]

RUN = ("run", "--on", "lab", "--", "train.py")
FOLLOWED = ("run", "--on", "lab", "--follow", "--", "train.py")


def test_a_program_runs_there_with_its_words_as_typed(laptop: Laptop) -> None:
    words = ["a b", 'it\'s "x" $HOME `id`', "new\nline", "*", "--on", "é"]
    done = laptop.slurmft(*FOLLOWED, *words)
    assert done.code == 0, done.err
    assert f"got {words}" in done.out
    assert "lab: sends folder" in done.err
    submission = laptop.runs()[0].load_config().submission
    assert submission.sender.endswith(f":{laptop.folder}")
    assert submission.command.startswith(
        "slurmft --on lab run --follow -- train.py 'a b'"
    )

    pulled = laptop.slurmft("pull", "last", "--on", "lab")
    assert pulled.code == 0, pulled.err
    here = laptop.folder / "runs" / laptop.runs()[0].path.name
    assert (here / "result.json").read_bytes() == laptop.runs()[0].result.read_bytes()
    mark = json.loads((here / "origin.json").read_text())
    assert (mark["cluster"], mark["is_own"], mark["accepted"]) == ("lab", True, [])

    report = laptop.slurmft("report", "last", "--on", "lab", "--output", "my report")
    assert report.code == 0, report.err
    assert (laptop.folder / "my report" / "report.html").stat().st_size > 1000


def test_login_shell_that_prints_a_greeting(laptop: Laptop) -> None:
    laptop.name("lab", "lab2", setup=["echo Welcome to the lab"])
    assert laptop.slurmft("run", "--on", "lab", "--", "train.py").code == 0
    greeting = "is no JSON; it begins with 'Welcome to the lab'"
    pulled = laptop.slurmft("pull", "last", "--on", "lab")
    assert f"error: the answer of lab {greeting}" in pulled.err
    assert "hint: where ~/.bashrc or ~/.profile print that" in pulled.err
    listed = laptop.slurmft("list", "--on", "lab,lab2", "--json")
    assert listed.code == 1
    assert json.loads(listed.out) == {"lab": None, "lab2": None}
    assert f"lab2: error: the answer of lab2 {greeting}" in listed.err


def test_exit_codes_and_errors_come_back(laptop: Laptop) -> None:
    (laptop.folder / "train.py").write_text("raise SystemExit('no such class: 7')\n")
    done = laptop.slurmft(*FOLLOWED)
    assert done.code == 1
    assert "no such class: 7" in done.out + done.err
    unknown = laptop.slurmft("submit", "--on", "lab", "--nodess", "2")
    assert unknown.code == 2
    assert "did you mean --nodes?" in unknown.err


def test_the_folder_there_is_as_here(laptop: Laptop) -> None:
    """What was removed here is removed there; what programs wrote there stays."""
    (laptop.folder / "old.py").write_text("")
    assert laptop.slurmft(*RUN).code == 0
    (project,) = laptop.there.glob("my project-*")
    assert (project / "old.py").exists()
    (project / "written").touch()
    (laptop.folder / "old.py").unlink()
    assert laptop.slurmft(*RUN).code == 0
    assert sorted(path.name for path in project.iterdir()) == ["train.py", "written"]


def test_git_decides_what_is_sent(laptop: Laptop) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(laptop.folder)]
    (laptop.folder / ".gitignore").write_text("data\n")
    (laptop.folder / "data").mkdir()
    (laptop.folder / "data" / "x.csv").write_text("1\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True, timeout=30)
    done = laptop.slurmft(*RUN, "--file=data/x.csv")
    assert done.code == 0, done.err
    assert "--file=data/x.csv is not sent" in done.err
    outside = laptop.folder.parent / "all my data.csv"
    outside.touch()
    done = laptop.slurmft(*RUN, "--file", "../all my data.csv")
    assert "../all my data.csv is not sent: it lies outside of the folder" in done.err
    commit = laptop.runs()[0].load_config().submission.git
    assert commit is not None
    assert len(str(commit.commit)) == 40


def test_inputs_are_sent(laptop: Laptop, tiny_model: Path, tiny_data: Path) -> None:
    flags = (
        "--task",
        "emotion",
        "--model",
        str(tiny_model),
        f"--data={tiny_data}",
        "--dry-run",
    )
    done = laptop.slurmft("submit", "--on", "lab", *flags)
    assert done.code == 0, done.err
    assert f"lab: sends {tiny_model}" in done.err
    text = done.out.partition("\n{")[2].partition("\n}")[0]
    settings = json.loads(f"{{{text}}}")["program"]["settings"]
    for name, path in (("model", tiny_model), ("data", tiny_data)):
        there = Path(settings[name])
        assert laptop.there / "inputs" in there.parents
        assert sorted(os.listdir(there)) == sorted(os.listdir(path))
    named = laptop.slurmft(
        "submit", "--on", "lab", "--data", "lab:/no/such", "--dry-run"
    )
    assert "lab: sends" not in named.err  # a path of the cluster's
    assert "'/no/such'" in named.err


@pytest.mark.parametrize(
    "place",
    [
        "../d 2",
        "../link to d",
        "sub/../../d 2",
        "away/../d 2",
        "in it",
        "link out",
        "linked files",
    ],
)
def test_paths_with_dots_links_and_spaces(
    place: str, laptop: Laptop, tmp_path: Path
) -> None:
    """What is sent are files with their contents, whatever leads to them here."""
    data = tmp_path / "d 2"
    data.mkdir()
    for split in ("train", "validation"):
        (data / f"{split}.csv").write_text("text,label\na,x\nb,y\nc,x\nd,y\n")
    here = laptop.folder
    (tmp_path / "link to d").symlink_to("d 2")
    (here / "sub").mkdir()
    # Its parent is that of the target.
    (tmp_path / "far").mkdir()
    (here / "away").symlink_to(tmp_path / "far")
    shutil.copytree(data, here / "in it")
    (here / "link out").symlink_to("../d 2")
    (here / "linked files").mkdir()
    for file in data.iterdir():
        (here / "linked files" / file.name).symlink_to(file)
    done = laptop.slurmft("data", "--on", "lab", place, "--json")
    assert done.code == 0, done.err
    split = json.loads(done.out)["splits"]["train"]
    assert split["texts"] == 4
    sent = Path(split["where"])
    assert sent.is_relative_to(laptop.there)
    assert not sent.is_symlink()


def test_outputs_come_back(laptop: Laptop) -> None:
    """What a program of the user's own has written in its folder, and nothing else."""
    (laptop.folder / "data").mkdir()
    (laptop.folder / "data" / "x.csv").write_text("1\n")
    (laptop.folder / "train.py").write_text(
        "import os, pathlib\n"
        "for name in ('out/a b.txt', 'log.csv', 'ckpt/step-1/w.pt', '.cache/x'):\n"
        "    path = pathlib.Path(name)\n"
        "    path.parent.mkdir(parents=True, exist_ok=True)\n"
        "    path.write_text(name)\n"
        "os.symlink('/etc/passwd', 'out/link')\n"
        "open(b'caf\\xe9', 'w').write('coffe')\n"
    )
    run = ("run", "--on", "lab", "--follow", "--checkpoint-dir", "ckpt")
    done = laptop.slurmft(*run, "--", "train.py")
    assert done.code == 0, done.err
    assert "to fetch outputs and records: slurmft pull last --on lab" in done.out
    pulled = laptop.slurmft("pull", "last", "--on", "lab")
    assert pulled.code == 0, pulled.err
    name = laptop.runs()[0].path.name
    outputs = laptop.folder / "runs" / name / "outputs"
    assert f"its outputs: 3 files, 23 bytes: runs/{name}/outputs" in pulled.out
    assert "left there: ckpt; --checkpoints fetches it" in pulled.out
    latin = os.fsdecode(b"caf\xe9")
    assert _files(outputs) == {"out/a b.txt", "log.csv", latin}
    assert (outputs / "out/a b.txt").read_text() == "out/a b.txt"
    again = laptop.slurmft("pull", "last", "--on", "lab", "--checkpoints")
    assert again.code == 0, again.err
    assert _files(outputs) == {"out/a b.txt", "log.csv", latin, "ckpt/step-1/w.pt"}


def _files(folder: Path) -> set[str]:
    """Paths of the files below a folder, links included."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


def test_predictions_come_back(
    laptop: Laptop, tiny_model: Path, tiny_data: Path
) -> None:
    flags = ("--task", "emotion", "--model", str(tiny_model), "--data", str(tiny_data))
    trained = laptop.slurmft(
        "submit", "--on", "lab", *flags, "--max-steps", "2", "--follow"
    )
    assert trained.code == 0, trained.err
    (laptop.folder / "new.csv").write_text("text\nI am glad\nhow sad\n")
    predict = ("predict", "last", "--follow", "new.csv", "--on", "lab")
    done = laptop.slurmft(*predict)
    assert done.code == 0, done.err
    assert len((laptop.folder / "new.predictions.csv").read_text().splitlines()) == 3
    assert_two_lines(laptop.slurmft(*predict), "'new.predictions.csv' is there")
    pulled = laptop.slurmft(
        "pull", trained.run.path.name, "--on", "lab", "--into", "here"
    )
    assert f"its model: here/{trained.run.path.name}/model" in pulled.out


def test_uv_starts_it_there(laptop: Laptop, tmp_path: Path) -> None:
    project = tmp_path / "its env"
    project.mkdir()
    about = '[project]\nname = "env"\nversion = "1"\nrequires-python = ">=3.11"\n'
    (project / "pyproject.toml").write_text(about)
    packages = f"{CHECKOUT}:{Path(pytest.__file__).parents[1]}"
    path = f"{sys.prefix}/bin:$PATH UV_OFFLINE=1 UV_PYTHON={sys.executable}"
    laptop.name("lab", setup=[f"export PYTHONPATH={packages} PATH={path}"])
    text = re.sub("(?m)^python = .*", f'uv = "{project}"', laptop.clusters.read_text())
    laptop.clusters.write_text(text)
    done = laptop.slurmft("list", "--on", "lab")
    assert done.code == 0, done.err
    assert "no such runs in " in done.out
    assert (project / ".venv").is_dir()


def test_several_clusters_in_one_list(laptop: Laptop) -> None:
    laptop.name("lab", "lab2")
    assert laptop.slurmft(*RUN).code == 0
    done = laptop.slurmft("list", "--on", "all")
    assert done.code == 0, done.err
    lab, _, lab2 = done.out.partition("\nlab2\n")
    assert lab.startswith("lab\n")
    assert laptop.runs()[0].path.name[:12] in lab
    assert "no such runs" in lab2
    found = json.loads(laptop.slurmft("list", "--json", "--on", "lab,lab2").out)
    assert [len(found[name]["runs"]) for name in ("lab", "lab2")] == [1, 0]


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "unknown cluster 'lab'"),
        ("[lab]\n", "needs one of python and uv"),
        ("[lab]\npythn = 'x'\n", "unknown key 'pythn'"),
        ("[lab]\npython = 7\n", "python must be a text, not 7"),
        ("lab = 7\n", "must be a table, not 7"),
        ("[lab\n", "cannot read the clusters' file"),
        ("lab = " + "[" * 5000, "cannot read the clusters' file"),
    ],
)
def test_mistakes_in_the_file(laptop: Laptop, text: str, fact: str) -> None:
    laptop.clusters.write_text(text)
    done = laptop.slurmft("list", "--on", "lab")
    assert done.code == 2
    assert fact in done.err
    assert "Traceback" not in done.err


def test_mistakes(laptop: Laptop) -> None:
    assert_two_lines(laptop.slurmft("list", "--on", "lap"), "unknown cluster 'lap'")
    assert_two_lines(laptop.slurmft("list", "--on="), "names no cluster")
    laptop.clusters.write_text(
        re.sub("(?m)^python.*", 'python = "/no"', laptop.clusters.read_text())
    )
    missing = laptop.slurmft("list", "--on", "lab")
    assert missing.code == 2
    assert "error: lab cannot start /no -P -m slurmft" in missing.err
    bare = laptop.folder.parent / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    laptop.clusters.write_text(
        re.sub("(?m)^python.*", f'python = "{bare}"', laptop.clusters.read_text())
    )
    missing = laptop.slurmft("list", "--on", "lab")
    assert missing.code == 2
    assert "hint: install slurmft there" in missing.err
    laptop.name("lab", "lab2")
    assert_two_lines(laptop.slurmft("submit", "--on", "all"), "runs on one cluster")
    laptop.clusters.unlink()
    assert_two_lines(laptop.slurmft("list", "--on", "lab"), str(laptop.clusters))


def test_no_server(laptop: Laptop) -> None:
    (laptop.sshd.folder / "none").write_text(
        "Host lab\n  HostName 127.0.0.1\n  Port 1\n"
    )
    text = laptop.clusters.read_text().replace(f"{laptop.sshd.folder}/config", "")
    laptop.clusters.write_text(text.replace("-F ", f"-F {laptop.sshd.folder}/none"))
    done = laptop.slurmft(*RUN)
    assert done.code == 3
    assert "error: no connection to lab" in done.err
    assert "Connection refused" in done.err


def test_nothing_heavy_is_imported(laptop: Laptop) -> None:
    code = (
        "import sys; from slurmft.__main__ import console\n"
        "code = console(['list', '--on', 'lab'])\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules], code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=laptop.folder,
        env=os.environ | laptop.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[] 0"


def test_a_terminal_here_is_a_terminal_there(laptop: Laptop) -> None:
    """Ctrl-C detaches there; the job goes on."""
    (laptop.folder / "train.py").write_text(
        "import time\nprint('begun')\ntime.sleep(1000)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(laptop.folder)
        command = [sys.executable, "-u", "-m", "slurmft", *FOLLOWED]
        os.execve(command[0], command, os.environ | laptop.env)
    text, deadline = "", time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            text += os.read(terminal, 4096).decode()
        except OSError:  # closed
            break
        begun = laptop.runs() and laptop.runs()[0].get_state().state == "running"
        if begun and "is running" in text and "\x03" not in text:
            os.write(terminal, b"\x03")
            text += "\x03"
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130, text
    assert "no longer following" in text
    assert laptop.runs()[0].get_state().state == "running"
    assert laptop.slurmft("cancel", "last", "--on", "lab").code == 0


# --- cut connections ------------------------------------------------------------------------------


def test_cut_while_files_are_sent(laptop: Laptop) -> None:
    (laptop.folder / "big.bin").write_bytes(os.urandom(60 * 2**20))
    sending = laptop.start(*FOLLOWED)
    until(lambda: list(laptop.there.glob("my project-*/.big.bin.*")))
    laptop.sshd.cut()
    done = laptop.end(sending)
    assert done.code == 3
    assert "error: no connection to lab, or it was cut" in done.err
    assert laptop.runs() == []
    again = laptop.slurmft(*FOLLOWED)
    assert again.code == 0, again.err
    assert "before the connection was cut" not in again.out
    assert len(laptop.runs()) == 1


def test_cut_before_the_submission(laptop: Laptop, tmp_path: Path) -> None:
    """What was started there goes on, and is not faster than the command's second call."""
    mark, cut = tmp_path / "mark", tmp_path / "cut"
    slow = f"touch '{mark}'; until [ -e '{cut}' ]; do sleep 0.1; done; sleep 4"
    laptop.name("lab", setup=[f"[ -e '{mark}' ] || {{ {slow}; }}"])
    first = laptop.start(*RUN)
    until(mark.exists)
    laptop.sshd.cut()
    assert laptop.end(first).code == 3
    cut.touch()
    again = laptop.slurmft(*RUN)
    assert again.code == 0, again.err
    until(lambda: not laptop.processes())  # the first has come to its submission, too
    assert len(laptop.runs()) == 1
    assert jobs(laptop) == 1


@pytest.mark.parametrize("moment", ["before", "while", "after"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ssh_that_is_killed(
    laptop: Laptop, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    """At each moment of a submission: the command says what to do, and that submits once."""
    mark, go = tmp_path / "mark", tmp_path / "go"
    waits = f"[ -e '{mark}' ] || {{ touch '{mark}'; sleep 1; }}"
    if moment == "before":
        laptop.name("lab", setup=[waits])
    (laptop.folder / "train.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.1)\n"
    )
    first = laptop.start(*FOLLOWED)
    until(
        {
            "before": mark.exists,
            "while": laptop.runs,
            "after": lambda: laptop.runs() and laptop.runs()[0].read_job(),
        }[moment]
    )
    for child in psutil.Process(first.pid).children():
        child.send_signal(number)
    done = laptop.end(first)
    assert done.code == 3
    error, hint = done.err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert "slurmft --on lab run --follow -- train.py" in hint
    assert "nothing is submitted twice" in hint
    go.touch()
    again = laptop.slurmft(*FOLLOWED)
    assert again.code == 0, again.err
    until(lambda: not laptop.processes())
    assert len(laptop.runs()) == 1
    assert jobs(laptop) == 1


def test_killed_within_the_submission(laptop: Laptop) -> None:
    def submitting() -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return [
                p
                for p in laptop.processes()
                if {"slurmft", "train.py"} <= {*p.cmdline()}
            ]
        return []

    first = laptop.start(*RUN)
    until(submitting)
    (process,) = submitting()
    until(laptop.runs)
    process.kill()
    laptop.sshd.cut()
    assert laptop.end(first).code != 0
    again = laptop.slurmft(*FOLLOWED)
    assert again.code == 0, again.err
    assert len(laptop.runs()) == 1
    assert jobs(laptop) == 1


def test_cut_after_the_submission(laptop: Laptop, tmp_path: Path) -> None:
    go = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.1)\n"
    (laptop.folder / "train.py").write_text(f"{waits}print('got', flush=True)\n")
    first = laptop.start(*FOLLOWED)
    until(lambda: laptop.runs() and laptop.runs()[0].read_job())
    laptop.sshd.cut()
    assert laptop.end(first).code == 3
    go.touch()
    again = laptop.slurmft(*FOLLOWED)
    assert again.code == 0, again.err
    assert "before the connection was cut" in again.out
    assert "got" in again.out.splitlines()
    assert len(laptop.runs()) == 1
    assert jobs(laptop) == 1
    assert laptop.slurmft(*RUN).code == 0  # it had its answer: this is another run
    assert len(laptop.runs()) == 2


def test_a_resume_is_submitted_once(laptop: Laptop) -> None:
    (laptop.folder / "train.py").write_text("raise SystemExit(7)\n")
    assert laptop.slurmft(*FOLLOWED).code == 7
    resume = ("resume", "last", "--on", "lab", "--json")
    requests = laptop.folder.parent / "state" / "slurmft" / "requests"
    first = laptop.start(*resume)
    until(lambda: list(requests.glob("*.json")))
    kept = next(requests.glob("*.json")).read_text()
    job = json.loads(laptop.end(first).out)["job"]
    until(lambda: laptop.runs()[0].get_state().state == "failed")
    assert list(requests.iterdir()) == []  # it has its answer
    env = {"SLURMFT_REQUEST": json.dumps({"request": json.loads(kept)["id"]})}
    run = str(laptop.runs()[0].path)
    again = slurmft("resume", run, "--json", env=env)
    assert json.loads(again.out)["job"] == job
    other = slurmft(
        "resume", run, "--json", env={"SLURMFT_REQUEST": '{"request": "another"}'}
    )
    assert json.loads(other.out)["job"] != job


def jobs(laptop: Laptop) -> int:
    """How many jobs have taken a run of the cluster's."""
    until(lambda: all(run.attempt.exists() for run in laptop.runs()))
    return sum(len(os.listdir(run.claims)) for run in laptop.runs())
