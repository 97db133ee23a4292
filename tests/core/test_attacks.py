"""What a second Unix user can do to a first one: who, what, and what comes of it.

`python -m tests.core.test_attacks` carries all out, and prints the table that docs/security.md has.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurmft.cluster import launcher, local
from slurmft.cluster.slurm import job_array
from slurmft.core.files import fingerprint, to_json, write_json
from slurmft.core.trusted import MARK
from slurmft.plugins.remote.forward import _hash_of_path
from slurmft.programs.description import OwnProgram
from slurmft.runs.rundir import RunDir
from tests.cluster.test_batch_script import Script
from tests.conftest import Done
from tests.programs.test_snapshot import taken_by, write_index
from tests.support import PATIENCE_S, lockfs
from tests.support.damage import NO_FILES
from tests.support.made_runs import write_run
from tests.support.users import REPOSITORY, User, two_users

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two other users"),
]


@pytest.fixture(scope="module")
def users() -> Iterator[tuple[User, User]]:
    with two_users() as made:
        yield made


@dataclass(frozen=True)
class Attack:
    """A line of the attack table."""

    who: str
    what: str
    result: str
    carry_out: Callable[[User, User], None]
    """By the second user on the first; fails if it succeeds."""


ATTACKS: list[Attack] = []


def attack(
    who: str, what: str, result: str
) -> Callable[..., Callable[[User, User], None]]:
    def add(carry_out: Callable[[User, User], None]) -> Callable[[User, User], None]:
        ATTACKS.append(Attack(who, what, result, carry_out))
        return carry_out

    return add


ANYBODY = "any user"
GROUP = "your group"


def run_of(
    user: User, name: str, *, state: str = "failed", job: str = "", **fields: Any
) -> RunDir:
    """A run that this user submitted."""
    run = write_run(user.home / "runs" / name, state=state, **fields)
    run.submitit.mkdir()
    launcher.note_job(run, "local", job or "4711", os.uname().nodename)
    for path in (run.path, *run.path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    user.own(user.home / "runs")
    return run


def assert_refused(done: Done, fact: str) -> None:
    assert done.code != 0, done.out
    assert [line.split(":")[0] for line in done.err.splitlines()] == [
        "error",
        "hint",
    ], done.err
    assert f"refused, as it would decide what runs as ada: {fact}" in done.err


# --- runs -----------------------------------------------------------------------------------------


def needs_rsync() -> None:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed")


@attack(
    ANYBODY,
    "writes `setup` lines into a run of theirs that you `resume`, by path, name or job id",
    "refused; nothing of it runs",
)
def resume(ada: User, eve: User) -> None:
    run = run_of(eve, "emotion-1", setup=(f"touch {ada.home}/attacked",))
    for path in (run.path, *run.path.rglob("*")):  # else it could not be resumed anyway
        path.chmod(0o777)
    for name in (str(run.path), "emotion-1", "emo", "4711"):
        where = ("--runs-dir", str(run.path.parent), "--cluster", "local")
        done = ada.slurmft("resume", name, *where)
        assert_refused(done, f"'{run.path}' belongs to eve")
    call = f"import slurmft; slurmft.Run({str(run.path)!r}).resume()"
    assert "belongs to eve" in ada.run(sys.executable, "-c", call).err
    assert not (ada.home / "attacked").exists()


@attack(
    GROUP,
    "writes into a run directory of yours whose mode allows it, before you `resume`",
    "refused, with the `chmod` that helps",
)
def resume_of_what_others_can_write(ada: User, eve: User) -> None:
    run = run_of(ada, "open-1")
    for path, mode in ((run.path, 0o777), (run.config, 0o666)):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        done = ada.slurmft("resume", str(run.path), "--cluster", "local")
        assert_refused(done, f"others can write '{path}' (mode {mode:04o})")
        assert f"hint: if you trust what is there: chmod go-w {path}" in done.err
        path.chmod(before)


@attack(
    ANYBODY,
    "names your process or job as the job of a run of theirs that you `cancel`",
    "refused; yours runs on",
)
def cancel(ada: User, eve: User) -> None:
    mine = subprocess.Popen(["sleep", "100"], user=ada.uid)
    try:
        run = run_of(eve, "cancel-me", state="running", job=str(mine.pid))
        eve.write(run.submitit / "pid.json", to_json(local.Process.of(mine.pid)))
        assert_refused(
            ada.slurmft("cancel", str(run.path)), f"'{run.path}' belongs to eve"
        )
        assert mine.poll() is None
    finally:
        mine.send_signal(signal.SIGKILL)
        mine.wait()


@attack(
    ANYBODY,
    "has a process whose name is no text where your jobs run, and a run that names it as its job",
    "your jobs end as they would; the run is shown",
)
def process_with_an_odd_name(ada: User, eve: User) -> None:
    # The shell itself: a program that it starts would have the name of its file.
    script = "printf '\\377' > /proc/$$/comm; echo; read -r _"
    with subprocess.Popen(
        ["bash", "-c", script],
        user=eve.uid,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as theirs:
        assert theirs.stdout is not None
        theirs.stdout.readline()
        assert Path(f"/proc/{theirs.pid}/comm").read_bytes() == b"\xff\n"
        run = run_of(eve, "odd-name", state="running", job=str(theirs.pid))
        eve.write(run.submitit / "pid.json", to_json(local.Process.of(theirs.pid)))
        done = ada.slurmft("status", str(run.path))
        assert done.code == 0, done.err
        assert "running" in done.out
        code = "from slurmft.core import process\n"
        code += "process.adopt_orphans(); process.end_descendants()"
        ada.python(code)
        assert theirs.stdin is not None
        theirs.stdin.close()


@attack(ANYBODY, "has a model that you `push` under your name", "refused")
def push(ada: User, eve: User) -> None:
    run = run_of(eve, "push-me", state="finished")
    eve.write(run.model / "model.safetensors", "")
    done = ada.slurmft("push", str(run.path), "ada/model", HF_TOKEN="x" * 20)
    assert_refused(done, f"'{run.path}' belongs to eve")


_SSH = """#!/bin/bash
# ssh to this machine, as far as slurmft and rsync can tell
while [ $# != 0 ]; do
  case $1 in -G) exit ;; -o) shift 2 ;; -*) shift ;; *) break ;; esac
done
shift
exec bash -c "$*"
"""


def _ssh_that_swaps(swap: str) -> str:
    """Returns an ssh that runs a command of a shell before rsync starts there."""
    before = f"shift\n[[ $* = *'exec rsync '* ]] && ({swap})\nexec"
    return _SSH.replace("shift\nexec", before)


def laptop_of(user: User, folder: Path) -> str:
    """Names a cluster "lab" for this user, whose folder is given; returns the file."""
    ssh = user.write(user.home / "bin" / "ssh", _SSH, 0o755)
    table = {
        "host": "lab",
        "ssh": str(ssh),
        "python": sys.executable,
        "folder": str(folder),
    }
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    clusters = user.write(user.home / "clusters.toml", f"[lab]\n{text}")
    return str(clusters)


@attack(
    ANYBODY,
    "has a run with shell lines, links, FIFOs and a forged mark, which you `pull`, then `follow`, "
    "`push`, `cancel` or `resume`",
    "regular files come alone; `resume` shows what it would execute, and asks; nothing of it runs",
)
def pull(ada: User, eve: User) -> None:
    needs_rsync()
    attacked = f"touch {ada.home}/attacked"
    run = run_of(eve, "pulled-1", setup=(attacked,))
    config = run.load_config()
    job = config.job.replaced({"notify_command": attacked})
    run.config.write_text(dataclasses.replace(config, job=job).to_json())
    (run.path / "model").symlink_to("/etc")
    os.mkfifo(run.path / "fifo")
    eve.write(run.path / "set uid", "").chmod(0o4755)
    eve.write(run.path / "origin.json", '{"is_own": true, "accepted": ["program"]}')
    lab = laptop_of(ada, ada.home / "lab")
    where = ("--runs-dir", str(run.path.parent))
    done = ada.slurmft("pull", "pulled-1", "--on", "lab", *where, SLURMFT_CLUSTERS=lab)
    assert done.code == 0, done.err
    assert "it belongs to eve there" in done.out
    here = ada.home / "runs" / "pulled-1"
    assert (here / "records.jsonl").is_file()
    for name in ("model", "fifo"):
        assert not os.path.lexists(here / name)
    for path in (here, *here.rglob("*")):
        assert path.lstat().st_uid == ada.uid
        assert path.lstat().st_mode & 0o7077 == 0
    for command in ("follow", "status", "report"):
        assert "Traceback" not in ada.slurmft(command, str(here)).err
    for words in (["cancel"], ["push", "ada/model"], ["resume"]):
        done = ada.slurmft(words[0], str(here), *words[1:])
        assert done.code != 0
        assert "came from elsewhere" in done.err
    local = ("--cluster", "local")
    assert f"setup: --setup '{attacked}'" in done.err
    assert "hint: if it may: --yes program,setup,notify-command" in done.err
    partly = ada.slurmft("resume", str(here), *local, "--yes", "program")
    assert "but the run executes notify-command, program, setup" in partly.err
    # What is here already, as a run of hers or a link, is not written over.
    ada.write(ada.home / "mine" / "pulled-1" / "config.json", "{}")
    done = ada.slurmft(
        "pull",
        "pulled-1",
        "--on",
        "lab",
        *where,
        "--into",
        "mine",
        SLURMFT_CLUSTERS=lab,
    )
    assert "is there, and did not come from lab" in done.err
    assert not (ada.home / "attacked").exists()


@attack(
    ANYBODY,
    "has a run whose `config.json` is a link, with a run of today in it, which you `pull`, before "
    "you `resume last`",
    "refused, and what came of it is removed",
)
def pull_of_no_run(ada: User, eve: User) -> None:
    needs_rsync()
    outer = run_of(eve, "pulled-2")
    outer.config.rename(outer.path / "c.json")
    outer.config.symlink_to("c.json")
    write_run(outer.path / "again", setup=(f"touch {ada.home}/attacked",))
    eve.own(outer.path)
    lab = laptop_of(ada, ada.home / "lab")
    where = ("--runs-dir", str(outer.path.parent))
    pull = ("pull", "pulled-2", "--on", "lab", *where, "--into", "fetched")
    done = ada.slurmft(*pull, SLURMFT_CLUSTERS=lab)
    assert done.code == 1
    assert "has no regular file 'config.json'" in done.err
    assert list((ada.home / "fetched").iterdir()) == []
    assert not (ada.home / "attacked").exists()


@attack(
    GROUP,
    "gives the name of the folder that `pull` fetches into to another folder of yours, while it "
    "waits for the cluster",
    "files come into the folder that was marked; nothing of yours is overwritten or removed",
)
def pull_into_another_folder(ada: User, eve: User) -> None:
    needs_rsync()
    shared = ada.home / "pulls"
    thesis = ada.write(shared / "mine" / "state.json", "thesis")
    run = run_of(eve, "pulled-3")
    lab = laptop_of(ada, ada.home / "lab")
    # With the command that starts rsync there: files are about to come.
    place = shlex.quote(str(shared))
    swap = f"cd {place} && mv pulled-3 aside && mv mine pulled-3"
    ada.write(ada.home / "bin" / "ssh", _ssh_that_swaps(swap), 0o755)
    words = ["pull", "pulled-3", "--on", "lab", "--runs-dir", str(run.path.parent)]
    words += ["--into", str(shared)]
    done = ada.slurmft(*words, SLURMFT_CLUSTERS=lab)
    assert done.code == 0, done.err
    assert os.listdir(shared / "pulled-3") == [thesis.name]
    assert (shared / "pulled-3" / thesis.name).read_text() == "thesis"
    assert (shared / "aside" / "origin.json").exists()
    assert (shared / "aside" / "records.jsonl").exists()
    # Nor where what comes is no run, and has to go.
    (shared / "pulled-3").rename(shared / "mine")
    shutil.rmtree(shared / "aside")
    run.config.rename(run.path / "c.json")
    run.config.symlink_to("c.json")
    done = ada.slurmft(*words, SLURMFT_CLUSTERS=lab)
    assert "what was fetched of it stays: it was replaced meanwhile" in done.err
    assert (shared / "pulled-3" / thesis.name).read_text() == "thesis"


@attack(
    ANYBODY,
    "makes the folder first into which `--on` sends your code, in a shared folder, or a link on "
    "the way to it, to another folder of yours",
    "refused; nothing is sent",
)
def folder_of_code(ada: User, eve: User) -> None:
    needs_rsync()
    shared = eve.home / "project"
    ada.write(ada.home / "code" / "train.py", "")
    name = f"code-{_hash_of_path(ada.home / 'code')}"
    eve.write(shared / name / "x", "")
    shared.chmod(0o1777)
    (shared / name).chmod(0o777)
    yours = ada.own(ada.write(ada.home / "yours" / name / "x", "").parent)
    yours.chmod(0o755)
    link = shared / "link"
    link.symlink_to(yours.parent)
    os.chown(link, eve.uid, eve.uid, follow_symlinks=False)
    for command, folder in (
        ("list --on lab", shared),
        ("run --on lab -- train.py", shared),
        ("list --on lab", link),
        ("run --on lab -- train.py", link),
    ):
        typed = f"cd code && {sys.executable} -m slurmft {command}"
        lab = laptop_of(ada, folder)
        done = ada.run("bash", "-c", typed, SLURMFT_CLUSTERS=lab)
        assert done.code != 0
        error, hint = done.err.splitlines()[-2:]
        assert f"{folder}/{name} is another user's, or a link" in error
        assert "name another folder in clusters.toml" in hint
    assert sorted(os.listdir(shared / name)) == ["x"]
    assert [os.listdir(yours), os.listdir(yours.parent)] == [["x"], [name]]
    assert yours.stat().st_mode & 0o777 == 0o755


@attack(
    ANYBODY,
    "has a folder of a name that the wildcards in the name of your run mean, before you `pull` it",
    "yours is fetched",
)
def wildcards_in_the_name_of_a_run(ada: User, eve: User) -> None:
    needs_rsync()
    lab = laptop_of(ada, ada.home / "lab")
    for name, other in (("lr[1]", "lr1"), ("run-?\\[*", "run-x[y")):
        mine = run_of(ada, name)
        theirs = run_of(eve, other).path.rename(mine.path.with_name(other))
        eve.write(theirs / "result.json", "{}")
        where = ("--runs-dir", str(mine.path.parent), "--into", "with-wildcards")
        words = ("pull", str(mine.path), "--on", "lab", *where)
        done = ada.slurmft(*words, SLURMFT_CLUSTERS=lab)
        assert done.code == 0, done.err
        here = ada.home / "with-wildcards" / mine.path.name
        assert (here / "config.json").is_file()
        assert not (here / "result.json").exists()


@attack(
    GROUP,
    "puts a folder of yours or theirs, where they can write, in the place of a run, while you "
    "`pull` it",
    "refused: nothing comes of it",
)
def swapped_run_there(ada: User, eve: User) -> None:
    needs_rsync()
    shared = ada.home / "runs of all"
    shared.mkdir()
    os.chown(shared, ada.uid, 21100)
    shared.chmod(0o2775)
    run = run_of(ada, "pulled-4", state="finished").path.rename(shared / "pulled-4")
    for user, name in ((eve, "theirs"), (ada, "open")):
        other = run_of(user, name).path.rename(shared / name)
        user.write(other / "result.json", '{"attacked": 1}')
        other.chmod(0o777)
    lab = laptop_of(ada, ada.home / "lab")
    words = ["pull", str(run), "--on", "lab", "--into", "swapped there"]
    here = ada.home / "swapped there" / "pulled-4"
    for name in ("theirs", "open"):
        swap = (
            f"cd {shlex.quote(str(shared))} && mv pulled-4 aside && mv {name} pulled-4"
        )
        ada.write(ada.home / "bin" / "ssh", _ssh_that_swaps(swap), 0o755)
        done = ada.slurmft(*words, SLURMFT_CLUSTERS=lab)
        assert done.code == 1, done.out
        assert "error: lab: another folder has the name by now" in done.err
        assert sorted(os.listdir(here)) == ["origin.json"]
        (shared / "pulled-4").rename(shared / name)
        (shared / "aside").rename(run)
    ada.write(ada.home / "bin" / "ssh", _SSH, 0o755)
    done = ada.slurmft(*words, SLURMFT_CLUSTERS=lab)
    assert done.code == 0, done.err
    assert json.loads((here / "origin.json").read_text())["is_own"]


_MKDIR = """#!/bin/bash
# mkdir, while others put a folder of theirs in the place of the one to which --on has sent code
/bin/mkdir "$@"
code=$?
[ $# != 4 ] || [ $code = 0 ] || { mv "$4" "$4-aside" && mv "$HOME/their-code" "$4"; }
exit $code
"""


@attack(
    GROUP,
    "puts a folder of theirs, or of yours where they can write, in the place of the one into which "
    "`--on` sends your code, before a command starts there",
    "refused; nothing of it runs",
)
def swapped_folder_of_code(ada: User, eve: User) -> None:
    needs_rsync()
    shared = ada.write(ada.home / "lab-of-all" / "x", "").parent
    os.chown(shared, ada.uid, 21100)
    shared.chmod(0o2775)
    ada.write(ada.home / "fake" / "mkdir", _MKDIR, 0o755)
    ada.write(ada.home / ".bash_profile", f"PATH={ada.home}/fake:$PATH\n")
    ada.write(ada.home / "sent" / "train.py", "print('mine')\n")
    lab = laptop_of(ada, shared)
    flags = "--cluster local --follow -- train.py"
    typed = f"cd sent && {sys.executable} -P -m slurmft --on lab run {flags}"
    for owner in (eve, ada):
        theirs = eve.write(ada.home / "their-code" / "train.py", "print('attacked')\n")
        os.chown(theirs.parent, owner.uid, 21100)
        theirs.parent.chmod(0o777)
        done = ada.run("bash", "-c", typed, SLURMFT_CLUSTERS=lab)
        assert done.code == 2
        assert "or others may have put it there" in done.err
        assert "attacked" not in done.out + done.err
        (swapped,) = shared.glob("sent-*-aside")
        shutil.rmtree(swapped.with_name(swapped.name.removesuffix("-aside")))
        swapped.rename(swapped.with_name(swapped.name.removesuffix("-aside")))
    (ada.home / ".bash_profile").unlink()


@attack(
    GROUP,
    "puts a folder of theirs in the place of the one in which a command works, typed there or by "
    "`--on`, before it has copied your program",
    "yours is copied",
)
def swapped_working_folder(ada: User, eve: User) -> None:
    shared = ada.home / "projects of all"
    for name, who in (("mine", ada), ("theirs", eve)):
        who.write(shared / name / "src" / "train.py", f"print('{name}')\n")
    os.chown(shared, ada.uid, 21100)
    shared.chmod(0o2775)
    code = f"""
import sys
from pathlib import Path
from slurmft.__main__ import main
from slurmft.programs import snapshot
shared = Path({str(shared)!r})
source = snapshot.source
def swap(*arguments, **named):
    (shared / "mine").rename(shared / "aside")
    (shared / "theirs").rename(shared / "mine")
    snapshot.source = source
    return source(*arguments, **named)
snapshot.source = swap
main(["run", "--cluster", "local", "--follow", "--runs-dir", *sys.argv[1:]])
"""
    for folder, name in (("mine", "src/train.py"), ("mine/src", "train.py")):
        os.chown(shared / "mine", ada.uid, ada.uid)
        runs = ada.home / "swapped runs" / folder
        place = shlex.quote(str(shared / folder))
        words = [sys.executable, "-P", "-c", code, str(runs), "--", name]
        done = ada.run("bash", "-c", f"cd {place} && {shlex.join(words)}")
        assert done.code == 0, done.err
        (shared / "mine").rename(shared / "theirs")
        (shared / "aside").rename(shared / "mine")
        (run,) = runs.iterdir()
        (copied,) = (run / "code").rglob("train.py")
        assert copied.read_text() == "print('mine')\n"
        assert "theirs" not in done.out


@attack(
    GROUP,
    "does so before it has imported the task that you name, by `--task` or `--on`",
    "yours is imported",
)
def swapped_folder_of_a_task(ada: User, eve: User) -> None:
    shared = ada.home / "tasks of all"
    for name, who in (("mine", ada), ("theirs", eve)):
        who.write(shared / name / "own_task_1.py", f"print('{name}')\n")
    code = f"""
from pathlib import Path
from slurmft.__main__ import main
from slurmft.train import own_task
shared = Path({str(shared)!r})
load = own_task._import_class
def swap(name):
    (shared / "mine").rename(shared / "aside")
    (shared / "theirs").rename(shared / "mine")
    return load(name)
own_task._import_class = swap
main(["submit", "--cluster", "local", "--task", "own_task_1:Task", "--dry-run"])
"""
    command = shlex.join([sys.executable, "-P", "-c", code])
    place = shlex.quote(str(shared / "mine"))
    done = ada.run("bash", "-c", f"cd {place} && {command}")
    assert "has no attribute 'Task'" in done.err
    assert done.out == "mine\n"


@attack(
    GROUP,
    "puts a link to a folder of yours in the place of one of your project, once `--on` has listed "
    "what it sends",
    "nothing is sent",
)
def link_in_what_is_sent(ada: User, eve: User) -> None:
    needs_rsync()
    project = ada.home / "linked project"
    ada.write(project / "train.py", "")
    ada.write(project / "keys" / "id_rsa", "no key")
    secret = ada.write(ada.home / "keys" / "id_rsa", "secret", 0o600)
    lab = laptop_of(ada, ada.home / "linked lab")
    code = f"""
import os
from pathlib import Path
from slurmft.__main__ import main
from slurmft.plugins.remote.forward import Forwarded
project = Path({str(project)!r})
send = Forwarded._send
def swap(self):
    (project / "keys").rename(project / "aside")
    os.symlink({str(secret.parent)!r}, project / "keys")
    return send(self)
Forwarded._send = swap
try: main(["run", "--on", "lab", "--", "train.py"])
except Exception as error: print(error)
"""
    command = shlex.join([sys.executable, "-P", "-c", code])
    typed = f"cd {shlex.quote(str(project))} && {command}"
    done = ada.run("bash", "-c", typed, SLURMFT_CLUSTERS=lab)
    assert "cannot copy the code" in done.out, done.err
    assert not list((ada.home / "linked lab").rglob("id_rsa"))


@attack(
    GROUP,
    "puts a run directory of theirs in the place of yours before the job starts",
    "the job ends with a line; nothing of it runs",
)
def swapped(ada: User, eve: User) -> None:
    scontrol = f'#!/bin/sh\necho "$*" >>{ada.home}/noted\n'
    ada.write(ada.home / "slurm" / "scontrol", scontrol, 0o755)
    slurm = f"{ada.home}/slurm:{os.environ['PATH']}"
    run = run_of(eve, "swapped-1")
    eve.write(run.script, f"touch {ada.home}/attacked")
    eve.write(run.code / "evil.py", f"open('{ada.home}/attacked', 'w')")
    config = json.loads(run.config.read_text())
    config["program"] |= {"code": str(run.code)}
    config["program"]["settings"]["task"] = "evil:Task"
    run.config.write_text(json.dumps(config))
    for path in (run.path, *run.path.rglob("*")):
        path.chmod(0o777)
    for command in (
        [sys.executable, "-m", "slurmft.node.task", str(run.path)],
        [sys.executable, "-m", "slurmft.train.rank", str(run.path)],
        [sys.executable, "-m", "slurmft.programs.process", str(run.path)],
        [
            sys.executable,
            "-m",
            "slurmft.cluster.slurm.first_node",
            "begin",
            str(run.path),
        ],
    ):
        done = ada.run(*command, PATH=slurm, SLURM_JOB_NODELIST="n1", SLURM_JOB_ID="1")
        assert done.code == 1
        assert "belongs to eve" in done.err
    # So that it is known: `slurmft status` shows the job's comment.
    assert "belongs to eve" in (ada.home / "noted").read_text()
    script = job_array.script_text([], {run: "true\n"})
    done = ada.run("bash", "-c", script, SLURM_ARRAY_TASK_ID="0")
    assert (done.code, done.out) == (1, "")
    words = "is another user's, or others can write it"
    assert done.err == f"refused: {run.submitit} {words}\n"
    assert not (ada.home / "attacked").exists()
    assert not run.rank_log(0).exists()


@attack(
    GROUP,
    "does so as soon as you have submitted it to this machine",
    "its `setup` lines are none of a file; the job ends with a line, and nothing of theirs runs",
)
def swapped_after_submission(ada: User, eve: User) -> None:
    theirs = run_of(eve, "swapped-2")
    eve.write(theirs.submitit / "setup.sh", f"touch {ada.home}/attacked")
    eve.write(theirs.submitit / "pid.json", "{}")
    for path in (theirs.path, *theirs.path.rglob("*")):
        path.chmod(0o777)
    runs = ada.home / "renamed runs"
    runs.mkdir()
    theirs.path.rename(runs / "theirs")
    os.chown(runs, ada.uid, ada.uid)
    code = f"""
import os
from pathlib import Path
from slurmft.cluster import local, submit
from slurmft.core.config import JobConfig, RunConfig
from slurmft.train.config import TrainConfig
runs = Path({str(runs)!r})
# Its controller still starts.
def swap(run, pid):
    run.path.rename(runs / "aside")
    (runs / "theirs").rename(run.path)
local.note_controller = swap
job = JobConfig(runs_dir=str(runs), setup=("touch own-setup",))
run = submit.create(RunConfig(program=TrainConfig.resolve().program(), job=job))
job_id = local.start(run.load_config(), run, "slurmft.cluster.local")
os.waitpid(int(job_id), 0)
print(Path("own-setup").exists())
"""
    assert ada.python(code) == "True\n"
    assert not (ada.home / "attacked").exists()
    (log,) = runs.glob("*/submitit/*_log.err")
    assert "belongs to eve" in log.read_text()


@attack(
    GROUP,
    "may rename your runs, as in a folder without the sticky bit, or in one that they have made "
    "first, with it",
    "you are warned at submission, with the folder and who can rename there",
)
def folders_where_others_rename(ada: User, eve: User) -> None:
    group = 21100
    top = ada.home.parent / "renaming"
    cases = {
        "private": (ada.uid, ada.uid, 0o755, ""),
        "private group": (ada.uid, ada.uid, 0o2775, ""),
        "sticky": (0, group, 0o1777, ""),
        "own sticky": (ada.uid, group, 0o3775, ""),
        "project": (0, group, 0o2775, f"the group {group}"),
        "own": (ada.uid, group, 0o2775, f"the group {group}"),
        "made first": (eve.uid, group, 0o1777, f"eve (uid {eve.uid})"),
        # Whoever alone can write it could as well have put another folder there.
        "site's": (eve.uid, group, 0o755, ""),
        "project/disk": (ada.uid, group, 0o755, f"the group {group}"),
        "sticky/disk": (eve.uid, group, 0o755, f"eve (uid {eve.uid})"),
        "sticky/root's": (0, group, 0o755, ""),
    }
    top.mkdir()
    top.chmod(0o755)
    for name, (owner, of_group, mode, _) in cases.items():
        if "/" in name:
            (top / name).symlink_to(top / "private")
        else:
            (top / name).mkdir()
            (top / name).chmod(mode)
        os.chown(top / name, owner, of_group, follow_symlinks=False)
    code = (
        "import sys; from pathlib import Path; from slurmft.core import trusted\n"
        f"for name in {list(cases)!r}:\n"
        f"    place = Path({str(top)!r}, name, 'runs', 'run')\n"
        "    renaming = trusted.renaming_on_the_way(place)\n"
        "    print(renaming.who if renaming else '')"
    )
    expected = [who for _, _, _, who in cases.values()]
    assert ada.python(code).splitlines() == expected
    submit = ("submit", "--task", "synthetic", "--cluster", "local", "--dry-run")
    done = ada.slurmft(*submit, "--runs-dir", str(top / "own"))
    assert (done.code, [line[:5] for line in done.err.splitlines()]) == (
        0,
        ["warni", "hint:"],
    )
    assert (
        f"the group {group} can rename what is in '{top}/own' (mode 2775)" in done.err
    )
    assert f"chmod +t {top}/own" in done.err
    assert ada.slurmft(*submit, "--runs-dir", str(top / "sticky")).err == ""


@attack(
    ANYBODY,
    "has a link to a run of yours that you `resume` or `cancel` by it, and lets it lead elsewhere "
    "meanwhile",
    "it is followed once, and what it led to is what is used; a link in a folder that others can "
    "write is refused, with the link, its owner, and the path that it leads to",
)
def link_of_another(ada: User, eve: User) -> None:
    run = run_of(ada, "linked-1")
    hers = run_of(eve, "linked-1", setup=(f"touch {ada.home}/attacked",))
    # In a folder that they alone can write they decide what is there, but once.
    switched = eve.home / "switched"
    switched.symlink_to(run.path)
    os.chown(switched, eve.uid, eve.uid, follow_symlinks=False)
    opening = (
        "from slurmft.cluster import submit; from slurmft.runs.rundir import RunDir\n"
        "from slurmft.runs import resolve\n"
        f"runs = [RunDir.open({str(switched)!r}), resolve.find('switched', {str(eve.home)!r})]\n"
    )
    # As if they had switched it by then.
    use = (
        f"real = {str(run.path)!r}\n"
        "assert [str(run.path) for run in runs] == [real, real]\n"
        "for run in runs: print(submit.show_resume(run, {'cluster': 'local'}))"
    )
    assert "attacked" not in ada.python(opening + use)
    switched.unlink()
    link(eve, switched, hers.path)
    assert "belongs to eve" in ada.slurmft("resume", str(switched)).err
    for name, target in (("theirs", run.path), ("theirs-above", run.path.parent)):
        link(eve, eve.home / name, target)
        path = eve.home / name
        if name == "theirs-above":
            path /= run.path.name
        # Where others can write, too, it may be anybody's.
        eve.home.chmod(0o1777)
        for command in ("resume", "cancel"):
            done = ada.slurmft(command, str(path))
            assert_refused(done, f"the link '{eve.home / name}' belongs to eve")
            assert f"hint: give the path itself: {run.path}" in done.err
        assert ada.slurmft("status", str(path)).code == 0
    link(ada, ada.home / "own-link", run.path)
    done = ada.slurmft(
        "resume", str(ada.home / "own-link"), "--cluster", "local", "--dry-run"
    )
    assert done.code == 0, done.err
    eve.home.chmod(0o755)


@attack(
    ANYBODY,
    "names a run after your sbatch job, in a shared `--runs-dir`, before its requeue",
    "not found; yours is made",
)
def run_of_your_job(ada: User, eve: User) -> None:
    run = run_of(eve, "synthetic-20261120-093012-77-ab12")
    eve.write(run.job, json.dumps({"cluster": "slurm", "id": "77"}))
    code = "from slurmft.runs.rundir import RunDir; "
    code += f"print(RunDir.of_job('{run.path.parent}', '77'))"
    assert eve.python(code) != "None\n"
    assert ada.python(code) == "None\n"


@attack(
    ANYBODY,
    "puts links to a file of yours where a command writes, in a run of theirs that you `follow`",
    "not followed; your file stays",
)
def links_under_names_of_writes(ada: User, eve: User) -> None:
    precious = ada.write(ada.home / "precious", "mine")
    folder = eve.home / "trap"
    folder.mkdir()
    folder.chmod(0o777)
    code = (
        "import os; from pathlib import Path\n"
        "from slurmft.core import files, removal\n"
        "os.urandom = lambda size: bytes(size)\n"
        f"path = Path({str(folder)!r}, 'state.json')\n"
        f"os.symlink({str(precious)!r}, removal.aside_of(path))\n"
        "try: files.write_text(path, 'attacked')\n"
        "except FileExistsError: print('refused')"
    )
    assert ada.python(code) == "refused\n"
    assert precious.read_text() == "mine"


@attack(
    GROUP,
    "puts a link among your runs, to a folder where you keep others, before you `clean`",
    "left out; also where it is swapped after you were shown what would be removed",
)
def clean(ada: User, eve: User) -> None:
    kept, runs = ada.home / "kept", eve.home / "linked"
    run = run_of(ada, "kept-1", state="finished")
    run.path.rename(kept)
    checkpoint = ada.write(kept / "checkpoints" / "step-00000020" / "x", "mine")
    ada.write(kept / "model" / "model.safetensors", "")
    runs.mkdir()
    for folder in (runs, kept, kept / "logs"):
        folder.chmod(0o755)
    eve.own(runs)
    (runs / "a").mkdir()
    (runs / "a" / "b").symlink_to(ada.home)
    eve.own(runs)
    done = ada.slurmft(
        "clean", "--runs-dir", str(runs), "--only", "checkpoints", "--yes"
    )
    assert "run(s) of other users" in done.err, done.out
    assert checkpoint.exists()
    code = (
        "from slurmft.cluster.cleanup import plan, remove\n"
        "from pathlib import Path; top = Path('own'); top.mkdir()\n"
        "Path('kept').rename(top / 'kept')\n"
        "(item,) = plan(top.absolute(), ['checkpoints'], 0).items\n"
        "(top / 'kept').rename(top / 'aside'); (top / 'kept' / 'checkpoints').mkdir(parents=True)\n"
        "print(remove(item), (top / 'kept' / 'checkpoints').exists())"
    )
    said = ada.python(code)
    assert "/checkpoints' could not be removed: it was replaced meanwhile" in said
    assert said.endswith(" True\n")


def link(user: User, place: Path, target: Path) -> None:
    """A link that this user has put in the place of what was there."""
    if place.exists():
        place.rename(place.with_name(f"{place.name}-before"))
    place.symlink_to(target)
    os.chown(place, user.uid, user.uid, follow_symlinks=False)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@attack(
    GROUP,
    "puts links to your home in the place of folders of a run whose mode allows it (`checkpoints`, "
    "`failures`, `submitit`), before you `clean`",
    "not followed; what `slurmft clean` leaves is named",
)
def clean_behind_links(ada: User, eve: User) -> None:
    before = names_in(ada.home)
    runs = ada.home / "cleaned"
    run = write_run(runs / "open-2", state="finished")
    run.submitit.mkdir()
    ada.write(run.model / "model.safetensors", "")
    ada.own(runs)
    run.path.chmod(0o777)
    hidden = [".ssh", ".git", ".profile.slurmft-12-ab0f", "bad-luck", "step-00000001"]
    home = ada.home / "elsewhere"
    for name in hidden:
        ada.write(home / name / "file", "mine")
    ada.own(home)
    for place in (run.checkpoints, run.failures, run.submitit):
        link(eve, place, home)
    # The user closes the run afterwards.
    for mode, left_out in (
        (0o777, "that others can have written"),
        (0o700, "`checkpoints` that are links"),
    ):
        run.path.chmod(mode)
        done = ada.slurmft(
            "clean", "--runs-dir", str(runs), "--yes", "--older-than", "0s"
        )
        assert done.code == 0, done.err
        assert left_out in done.err
    assert names_in(home) == set(hidden)
    assert names_in(ada.home) >= before


@attack(
    GROUP,
    "does so before a job of the run starts, ends or sends its message",
    "not followed; a warning of the run says what stays",
)
def end_behind_links(ada: User, eve: User) -> None:
    run = write_run(ada.home / "ended" / "open-3", state="running")
    run.submitit.mkdir()
    ada.own(run.path.parent)
    home = ada.home / "notes"
    names = {".step-1.slurmft-12-ab0f", "bad-step-1", "pid.json", "3", "README.md"}
    for name in names - {"3"}:
        ada.write(home / name, "mine")
    ada.write(home / "3", "")
    os.utime(home / "3", (0, 0))
    run.path.chmod(0o777)
    for place in (run.checkpoints, run.submitit, run.notifications):
        link(eve, place, home)
    code = (
        "from slurmft.job import checkpoints; from slurmft.runs.rundir import RunDir\n"
        "from slurmft.plugins.notify import notification\n"
        f"run = RunDir.open({str(run.path)!r})\n"
        "print(*checkpoints.remove_leftovers(run, bad=True))\n"
        "try: notification._claim(run.notifications / '3')\n"
        "except OSError as error: print(error)\n"
    )
    assert "'checkpoints' on the way belongs to another user" in ada.python(code)
    assert names_in(home) == names


@attack(
    GROUP,
    "puts leftovers of theirs, and links of the same names, into your folder of runs, before you "
    "`clean`",
    "left out",
)
def leftovers_of_another(ada: User, eve: User) -> None:
    runs = ada.home / "sticky"
    kept = ada.write(ada.home / "kept-2" / "file", "mine")
    ada.write(runs / ".ada.slurmft-12-ab01" / "file", "")
    ada.own(runs)
    runs.chmod(0o1777)
    eve.write(runs / ".eve.slurmft-12-ab02" / "file", "hers")
    link(eve, runs / ".link.slurmft-12-ab03", kept.parent)
    done = ada.slurmft("clean", "--runs-dir", str(runs), "--yes")
    assert done.code == 0, done.err
    assert names_in(runs) == {".eve.slurmft-12-ab02", ".link.slurmft-12-ab03"}
    assert kept.exists()


@attack(
    GROUP,
    "makes a run of a folder of yours where they may write, or gives another of yours the name of "
    "a leftover, before you `clean`",
    "left; it says so",
)
def folder_that_becomes_a_run(ada: User, eve: User) -> None:
    runs = ada.home / "group-runs"
    run = write_run(runs / "shared-1", state="finished")
    eve.own(runs)
    run.path.chmod(0o777)
    os.chown(run.path, ada.uid, ada.uid)
    eve.write(run.model / "model.safetensors", "")
    kept = ada.write(run.checkpoints / "step-00000010" / "file", "mine")
    ada.own(run.checkpoints)
    thesis = ada.write(ada.home / "thesis-1" / "file", "mine")
    runs.chmod(0o777)
    thesis.parent.rename(runs / ".x.slurmft-1-abcd")
    done = ada.slurmft("clean", "--runs-dir", str(runs), "--yes", "--older-than", "0s")
    assert done.code == 0, done.err
    assert "1 run(s) that others can have written" in done.err
    assert "1 leftover(s) in " in done.err
    assert kept.exists()
    assert (runs / ".x.slurmft-1-abcd" / "file").exists()


@attack(
    GROUP,
    "may write into the folder of a larger disk to which your own link `checkpoints` leads, and "
    "gives things of yours the names of checkpoints there",
    "left, by `clean` and by the job at its end; it says so",
)
def checkpoints_where_others_rename(ada: User, eve: User) -> None:
    disk = ada.home / "disk of the group"
    names = {"step-00000001", "bad-step-00000001", ".step-00000002.slurmft-12-ab0f"}
    for case, (disk_mode, above_mode) in enumerate(((0o777, 0o755), (0o755, 0o1777))):
        place = disk / str(case) / "mine"
        for name in names:
            ada.write(place / name / "file", "mine")
        runs = ada.home / f"with-link-{case}"
        run = write_run(runs / "linked-2", state="finished")
        ada.write(run.model / "model.safetensors", "")
        ada.own(runs)
        run.path.chmod(0o700)
        link(ada, run.checkpoints, place)
        # Of its group, the project's, she is no member: the mode counts.
        os.chown(place, ada.uid, 21100)
        place.chmod(disk_mode)
        os.chown(place.parent, eve.uid if case else ada.uid, 21100)
        place.parent.chmod(above_mode)
        done = ada.slurmft(
            "clean", "--runs-dir", str(runs), "--yes", "--older-than", "0s"
        )
        assert done.code == 0, done.err
        assert "1 `checkpoints` that lead to where others can rename" in done.err
        code = (
            "from slurmft.job import checkpoints; from slurmft.runs.rundir import RunDir\n"
            f"print(*checkpoints.remove_leftovers(RunDir.open({str(run.path)!r}), bad=True))"
        )
        assert "stays: others can rename what is there" in ada.python(code)
        assert names_in(place) == names


@attack(
    ANYBODY,
    "makes folders of a task's name in /dev/shm, and links of that name to yours",
    "left alone",
)
def memory_of_another(ada: User, eve: User) -> None:
    place = ada.home.parent / "shm"
    place.mkdir()
    place.chmod(0o1777)
    kept = ada.write(ada.home / "kept-3" / "file", "mine")
    code = (
        "import os; from pathlib import Path; from slurmft.node import watchdog\n"
        "print(watchdog._prefix())"
    )
    prefix = ada.python(code).strip()
    gone = 2**22 + 1  # no process has this number
    eve.write(place / f"{prefix}{gone}-eve" / "rank-0", "hers")
    link(eve, place / f"{prefix}{gone}-link", kept.parent)
    ada.write(place / f"{prefix}{gone}-ada" / "rank-0", "")
    ada.python(
        "from pathlib import Path; from slurmft.node import watchdog\n"
        f"watchdog.remove_stale(Path({str(place)!r}))"
    )
    assert names_in(place) == {f"{prefix}{gone}-eve", f"{prefix}{gone}-link"}
    assert kept.exists()


@attack(
    GROUP,
    "puts a link, or a file of theirs, where a command of `--on` keeps its lock among your runs",
    "refused; nothing is made elsewhere",
)
def lock_of_a_request(ada: User, eve: User) -> None:
    runs = ada.home / "requested"
    runs.mkdir()
    runs.chmod(0o1777)
    link(eve, runs / ".request-aaaaaa", ada.home / "made")
    eve.write(runs / ".request-bbbbbb", "").chmod(0o666)
    os.mkfifo(runs / ".request-cccccc", 0o666)
    os.chown(runs / ".request-cccccc", eve.uid, eve.uid)
    code = (
        "from pathlib import Path; from slurmft.runs import request\n"
        "for letter in 'abcd':\n"
        "    try:\n"
        f"        with request.alone(Path({str(runs)!r}), letter * 6): print('locked')\n"
        "    except Exception as error: print(error.message)"
    )
    *refused, last = ada.python(code).splitlines()
    assert len(refused) == 3
    assert all(f"belongs to eve (uid {eve.uid})" in line for line in refused)
    assert last == "locked"
    assert not (ada.home / "made").exists()
    assert len(list(runs.iterdir())) == 3


# --- folders where you type commands --------------------------------------------------------------


def submissions(ada: User, folder: Path, path: str = str(REPOSITORY)) -> None:
    """Has Ada ask in a folder what would be submitted, of a training and of her own program."""
    program = ada.write(ada.home / "programs" / "train.py", "")
    for words in (
        ["submit", "--task", "synthetic"],
        ["run", "--snapshot", "none", "--", str(program)],
        ["run", "--", "train.py"],
    ):
        if words[-1] == "train.py" and not (folder / "train.py").exists():
            continue
        place = words.index("--") if "--" in words else len(words)
        words[place:place] = ["--cluster", "local", "--dry-run"]
        command = shlex.join([sys.executable, "-m", "slurmft", *words])
        done = ada.run("bash", "-c", f"cd {folder} && {command}", PYTHONPATH=path)
        assert done.code == 0, done.err


@attack(
    GROUP,
    "puts `json.py`, `psutil.py`, `submitit.py`, `torch.py` and the like into the folder where you "
    "type commands",
    "not imported",
)
def modules_in_the_folder(ada: User, eve: User) -> None:
    folder = ada.home.parent / "shared-1"
    code = f"import os; os.system('touch {ada.home}/attacked')\n"
    names = (
        "json", "psutil", "shtab", "submitit", "torch", "typing", "dataclasses", "argparse", "yaml",
        "sitecustomize", "usercustomize", "subprocess", "re", "rich", "jinja2", "numpy", "datasets",
    )  # fmt: skip
    for name in names:
        eve.write(folder / f"{name}.py", code)
    submissions(ada, folder)
    # `export PYTHONPATH=/code:$PYTHONPATH` makes an empty entry.
    # Python imports them itself at its start, or what finds an editable installation does.
    for name in ("sitecustomize", "usercustomize", "re", "typing"):
        (folder / f"{name}.py").unlink()
    submissions(ada, folder, f"{REPOSITORY}:")
    assert not (ada.home / "attacked").exists()


@attack(
    GROUP,
    "names programs in `.git/config` of a work tree that you share: a monitor, filters, also of "
    "names with `=`, diff drivers, in an included file, in a submodule, or while you submit",
    "not started",
)
def programs_of_git(ada: User, eve: User) -> None:
    tree = ada.home / "tree"
    ada.write(tree / "train.py", "")
    made = (
        f"cd {tree} && git init -q && git -c user.name=a -c user.email=a add . && "
        "git -c user.name=a -c user.email=a commit -qm one"
    )
    assert ada.run("bash", "-ec", made).code == 0
    trap = eve.write(
        eve.home / "trap-1", f"#!/bin/sh\ntouch {ada.home}/attacked\ncat\n", 0o755
    )
    sections = [f"[core]\nfsmonitor = {trap}", "[include]\npath = more"]
    for name in ("x", "a=b", ""):
        sections.append(f'[filter "{name}"]\nclean = {trap}\nrequired = true')
    sections.append(f'[diff "x"]\ncommand = {trap}\ntextconv = {trap}')
    with open(tree / ".git" / "config", "a") as file:
        file.write("\n".join(sections))
    eve.write(tree / ".git" / "more", f'[filter "y"]\nprocess = {trap}\n')
    for number, name in enumerate(("x", "a=b", "", "y")):
        ada.write(tree / f"f{number}", "1\n")
        with open(tree / ".git" / "info" / "attributes", "a") as file:
            file.write(f"f{number} filter={name} diff=x\n")
    plain = "git -c core.fsmonitor= -c core.attributesFile= add -f f0 f1 f2 f3; rm -f attacked"
    ada.run("bash", "-c", f"cd {tree} && {plain}")
    (ada.home / "attacked").unlink(missing_ok=True)
    for number in range(4):
        ada.write(tree / f"f{number}", "2\n")
    submissions(ada, tree)
    assert not (ada.home / "attacked").exists()
    # It snaps where git itself is asked.
    ada.run("bash", "-c", f"cd {tree} && git status")
    assert (ada.home / "attacked").exists()
    (ada.home / "attacked").unlink()


@attack(
    ANYBODY,
    "has a repository with such a configuration, in which you submit; or a bare one within your "
    "work tree",
    "not started",
)
def repository_of_another(ada: User, eve: User) -> None:
    trap = eve.write(
        eve.home / "trap-2", f"#!/bin/sh\ntouch {ada.home}/attacked\n", 0o755
    )
    theirs = eve.home / "tree"
    eve.write(theirs / "plain", "")
    lines = f"core.bare false && git config core.fsmonitor {trap}"
    made = f"cd {theirs} && git init -q && git config {lines}"
    assert eve.run("bash", "-ec", made).code == 0
    bare = ada.home / "tree-2" / "data"
    ada.write(bare / "notes", "")
    made = (
        f"cd {bare.parent} && git init -q && cd data && git init -q --bare . && git config "
        f"{lines} && git config core.worktree {bare}"
    )
    assert ada.run("bash", "-ec", made).code == 0
    for folder in (theirs, bare):
        submissions(ada, folder)
        assert not (ada.home / "attacked").exists()


@attack(
    ANYBODY,
    "has a repository whose index names files by `..`, or beyond links to your home or /proc, in "
    "which you submit a program",
    "refused, or named and left out; nothing is written elsewhere, and no file of yours copied",
)
def index_of_a_repository(ada: User, eve: User) -> None:
    """As of an archive that ada has unpacked: all files are hers."""
    tree = ada.home / "archive"
    ada.write(tree / "x.py", "print(1)")
    ada.write(tree / "a" / "b" / "c" / "y.py", "")
    secret = ada.write(ada.home / ".secrets" / "key", "secret", 0o600)
    victim = ada.write(ada.home / "site.toml", "before")
    runs = ada.own(ada.write(ada.home / "runs of archive" / "x", "").parent)
    assert ada.run("bash", "-ec", f"cd {tree} && git init -q").code == 0
    for name, target, reason in (
        ("l/../../../../site.toml", "a/b/c", "which may lead out of it"),
        ("l/key", str(secret.parent), "print(1) 1"),
        ("l/environ", "/proc/self", "print(1) 1"),
    ):
        (tree / "l").symlink_to(target)
        write_index(tree, "x.py", name)
        ada.own(tree)
        assert reason in taken_by(ada, tree / "x.py", runs)
        (tree / "l").unlink()
    assert victim.read_text() == "before"
    assert not [*runs.rglob("key"), *runs.rglob("environ"), *runs.rglob("site.toml")]


@attack(
    GROUP,
    "puts a link, a FIFO or a file of terabytes in the place of a file of your program, or a link "
    "in that of its folder, after slurmft has listed it",
    "the submission ends with its name; nothing of it is copied",
)
def exchanged_code(ada: User, eve: User) -> None:
    secret = ada.write(ada.home / "keys" / "y.py", "secret", 0o600)
    for number, change in enumerate(
        (
            f"os.remove(file); os.symlink({str(secret)!r}, file)",
            "os.remove(file); os.mkfifo(file)",
            "os.truncate(file, 2**42)",
            f"os.rename(folder, 'before'); os.symlink({str(secret.parent)!r}, folder)",
        )
    ):
        tree = ada.home / f"exchanged-{number}"
        ada.write(tree / "x.py", "")
        ada.write(tree / "pkg" / "y.py", "")
        code = (
            "import os; from pathlib import Path\n"
            "from slurmft.core.errors import SlurmftError\n"
            "from slurmft.programs import snapshot; from slurmft.runs.rundir import RunDir\n"
            f"os.chdir({str(tree)!r}); run = RunDir(Path('../run-{number}').absolute())\n"
            "run.path.mkdir(); file = Path('pkg/y.py'); folder = 'pkg'\n"
            f"code = snapshot.source(Path('x.py')); {change}\n"
            "try: snapshot.take(code, run)\n"
            "except SlurmftError as error: print(error)"
        )
        assert f"cannot copy the code: '{tree}/pkg/y.py': " in ada.python(code)
        assert names_in(ada.home / f"run-{number}") == set()


@attack(
    ANYBODY,
    "makes `.git` in a folder above the one in which you submit a program, where all may make "
    "files",
    "passed over",
)
def repository_above(ada: User, eve: User) -> None:
    shared = ada.place / "scratch-git"
    program = ada.write(shared / "ada" / "x.py", "mine")
    os.chown(shared, 0, 0)
    shared.chmod(0o1777)
    runs = ada.write(ada.home / "runs-git" / "x", "").parent
    for make in ("mkdir", "touch", "mkfifo", "git init -q"):
        path = str(shared / ".git")
        if make == "git init -q":
            path = str(shared)
        assert eve.run("bash", "-c", f"{make} {path}").code == 0
        assert taken_by(ada, program, runs) == "mine 1\n"
        eve.run("rm", "-rf", str(shared / ".git"))


# Looks for files as uv does: in the folder of its project, and in those above.
_UV = """#!/bin/sh
project=$(pwd)
[ "$1" != --project ] || project=$2
while [ "$project" != / ]; do
    for name in pyproject.toml uv.lock uv.toml .python-version; do
        [ ! -e "$project/$name" ] || cat "$project/$name" >>"$HOME/read"
    done
    project=$(dirname "$project")
done
"""


@attack(
    ANYBODY,
    "makes `pyproject.toml`, `uv.lock`, `uv.toml` or `.python-version` in the folder in which you "
    "submit with `--env uv`, or above it, where all may make files",
    "nothing of it is read; where that leaves no project of yours, refused",
)
def project_above(ada: User, eve: User) -> None:
    shared = ada.place / "scratch-uv"
    ada.write(shared / "ada" / "pyproject.toml", "mine\n")
    ada.write(shared / "ada" / "uv.lock", "mine\n")
    ada.write(shared / "none" / "x", "")
    ada.write(ada.home / "bin" / "uv", _UV, 0o755)
    os.chown(shared, 0, 0)
    shared.chmod(0o1777)
    for name in ("pyproject.toml", "uv.lock", "uv.toml", ".python-version"):
        eve.write(shared / name, "theirs\n")
    lock = eve.write(ada.place / "scratch-lock" / "uv.lock", "theirs\n")
    os.chown(lock.parent, 0, 0)
    lock.parent.chmod(0o1777)
    folders = [f"{shared}/ada", f"{shared}/none", str(shared), str(lock.parent)]
    code = f"""
import os, pathlib
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError
from slurmft.programs import environment
os.environ["PATH"] = {str(ada.home / "bin")!r} + ":" + os.environ["PATH"]
for folder in {folders!r}:
    try:
        folder = pathlib.Path(folder)
        environment.folder("uv", folder, JobConfig(runs_dir="runs-uv"), make=True)
    except SlurmftError as error:
        print(error.message)
"""
    planted = [shared / "pyproject.toml", shared / "pyproject.toml", lock]
    refusals = [f"--env uv: '{p}' belongs to eve (uid {eve.uid})" for p in planted]
    assert ada.python(code).splitlines() == refusals
    assert set((ada.home / "read").read_text().split()) == {"mine"}


@attack(
    ANYBODY,
    "has a study folder that you give to `study run` or `study cancel`",
    "refused",
)
def study(ada: User, eve: User) -> None:
    folder = eve.home / "studies" / "s"
    text = 'name = "s"\nscaling = "weak"\n[fixed]\nmax_steps = 1\n[grid]\nnodes = [1]\n'
    eve.write(folder / "study.toml", text)
    folder.chmod(0o777)
    for command in ("run", "cancel"):
        where = ("--cluster", "local") if command == "run" else ()
        done = ada.slurmft("study", command, str(folder), *where)
        assert_refused(done, f"'{folder}' belongs to eve")
    # Of another name, its runs would go into a folder of hers.
    eve.write(folder / "study.toml", text.replace('name = "s"', 'name = "other"'))
    folder.chmod(0o755)
    for command in ("run", "cancel"):
        where = ("--cluster", "local") if command == "run" else ()
        done = ada.slurmft("study", command, str(folder), *where)
        assert_refused(done, f"'{folder}' belongs to eve")
    assert ada.slurmft("study", "status", str(folder)).code == 0


@attack(
    GROUP,
    "puts a study folder of theirs in the place of yours until you have begun to `study run` it",
    "refused; nothing of theirs is submitted",
)
def study_swapped(ada: User, eve: User) -> None:
    text = (
        'name = "s"\n[fixed]\ntask = "synthetic"\nsetup = ["{}"]\n[grid]\nnodes = [1]\n'
    )
    studies = ada.home / "swapped-studies"
    ada.write(studies / "mine" / "study.toml", text.format("true"))
    eve.write(studies / "s" / "study.toml", text.format("touch attacked"))
    ada.own(studies / "mine")
    os.chown(studies, ada.uid, 21100)
    studies.chmod(0o2775)
    code = f"""
import os, sys
from slurmft.plugins.studies import runner, spec
from slurmft.plugins.studies.commands import study
read_text = spec.read_text
def read_and_swap(path):
    text = read_text(path)
    os.rename("s", "theirs")
    os.rename("mine", "s")
    return text
spec.read_text = read_and_swap
runner.run_one = lambda todo, repeat: sys.exit(str(todo.configs[repeat.key].job.setup))
os.chdir({str(studies)!r})
study.main(["run", "s", "--cluster", "local", "--studies-dir", "."])
"""
    done = ada.run(sys.executable, "-c", code)
    assert "touch attacked" not in done.err
    # What was opened is what is used: hers.
    assert "('true',)" in done.err


@attack(
    GROUP,
    "has runs in the folder of runs of your study, where they can write, or to which your own link "
    "leads, and names processes of yours in them, before you `study run` or `study cancel` it",
    "refused, with the folder; your process runs on",
)
def runs_among_those_of_a_study(ada: User, eve: User) -> None:
    text = 'name = "{}"\n[fixed]\ntask = "synthetic"\n[grid]\nnodes = [1]\n'
    other = subprocess.Popen(["sleep", "100"], user=ada.uid)
    try:
        for name in ("open", "link"):
            study = ada.write(
                ada.home / "open-studies" / name / "study.toml", text.format(name)
            ).parent
            runs = study / "runs"
            if name == "link":
                runs.symlink_to(ada.home / "project")
                os.lchown(runs, ada.uid, ada.uid)
            theirs = run_of(eve, f"among-{name}", state="running", job=str(other.pid))
            process = to_json(local.Process.of(other.pid))
            eve.write(theirs.submitit / "pid.json", process)
            runs.resolve().mkdir()
            os.chown(runs, ada.uid, 21100)
            runs.chmod(0o2775)
            theirs.path.rename(runs / theirs.path.name)
            for words in (("cancel",), ("run", "--cluster", "local", "--yes")):
                done = ada.slurmft("study", *words, str(study))
                assert done.code != 0
                assert f"others can write '{runs}' (mode 2775)" in done.err
                assert other.poll() is None
            # A link of hers to a run of theirs, in a folder that nobody else can write.
            runs.chmod(0o755)
            done = ada.slurmft("study", "cancel", str(study))
            assert "belongs to eve" in done.err
            assert "its job, if it has one, is not cancelled" in done.err
            assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@attack(
    GROUP,
    "gives the name of a metric, an image of a registry, or a study that comes along to a file of "
    "theirs in the folder where you type commands",
    "refused, with the path to give if you mean that; nothing of it runs",
)
def names_with_two_meanings(ada: User, eve: User) -> None:
    eve.write(ada.home / "f1" / "f1.py", f"open('{ada.home}/attacked', 'w')\n")
    eve.write(ada.home / "nvcr.io" / "torch", "")
    eve.write(ada.home / "lab-train", 'name = "lab-train"\n[grid]\nnodes = [1]\n')
    for path in (ada.home / "f1", ada.home / "f1" / "f1.py", ada.home / "nvcr.io"):
        os.chown(path, eve.uid, eve.uid)
    submit = ("submit", "--task", "emotion", "--dry-run", "--cluster", "local")
    for words, name in (
        ((*submit, "--metric", "f1"), "f1"),
        (("submit", "--task", "synthetic", "--container", "nvcr.io/torch"), "nvcr.io/torch"),
        (("study", "run", "lab-train", "--dry-run", "--cluster", "local"), "lab-train"),
    ):  # fmt: skip
        done = ada.slurmft(*words)
        assert done.code != 0
        assert f"'{ada.home}/{name}', which belongs to eve" in done.err
        assert f"hint: if you mean that: ./{name}" in done.err
    assert not (ada.home / "attacked").exists()
    shutil.rmtree(ada.home / "f1")
    shutil.rmtree(ada.home / "nvcr.io")
    (ada.home / "lab-train").unlink()


@attack(
    GROUP,
    "gives the name of a model or data set of the hub to a folder of theirs in the folder where "
    "you submit, before or after you do so",
    "before: a warning says what is read; after: the job ends with a line, and reads nothing of it",
)
def names_of_the_hub(ada: User, eve: User) -> None:
    here = ada.write(ada.home / "with-names" / "x", "").parent
    eve.write(here / "lab" / "data" / "train.jsonl", "")
    os.chown(here / "lab" / "data", eve.uid, eve.uid)
    submit = (
        "submit --task text-classification --data lab/data --dry-run --cluster local"
    )
    command = f"cd {here}; {sys.executable} -P -m slurmft {submit}"
    done = ada.run("bash", "-c", command)
    words = f"--data 'lab/data' is '{here}/lab/data' here, which belongs to eve"
    assert words in " ".join(done.err.split())
    code = f"""
import os
from slurmft.core.errors import UsageError
from slurmft.train.config import TrainConfig
from slurmft.train.login.sources import check_hub_names
os.chdir({str(here)!r})
given = {{"task": "text-classification", "model": "lab/model", "data": "lab/data"}}
for changes in ({{}}, {{"data": "lab/other"}}, {{"data": "lab/other", "mix": ("lab/data:0.5",)}}):
    try: print(check_hub_names(TrainConfig.resolve(**given | changes)))
    except UsageError as error: print(error.message)
"""
    taken = f"'lab/data' is a name of the hub, and by now '{here}/lab/data' has it, too"
    assert ada.python(code).splitlines() == [
        f"--data {taken}",
        "None",
        f"--mix {taken}",
    ]


@attack(
    GROUP,
    "puts links to files of yours where you `render`",
    "replaced, and not followed; your files stay",
)
def output_behind_links(ada: User, eve: User) -> None:
    kept = ada.write(ada.home / "kept-output", "mine")
    folder = ada.write(ada.home / "deploy" / "x", "").parent
    ada.own(folder)
    for name in ("Dockerfile", "slurmft-synthetic.yaml"):
        link(eve, folder / name, kept)
    words = ("--image", "i", "--claim", "c", "--task", "synthetic")
    done = ada.slurmft("render", "kubernetes", *words, "--output", str(folder))
    assert done.code == 0, done.err
    assert kept.read_text() == "mine"
    assert "FROM" in (folder / "Dockerfile").read_text()


@attack(
    GROUP,
    "puts a run of theirs, which names a process or job of yours, in the place of yours while you "
    "`cancel` it, or a study of theirs, while you `study cancel`",
    "the run that was looked at is cancelled, or none; your process runs on",
)
def swapped_while_cancelled(ada: User, eve: User) -> None:
    other = subprocess.Popen(["sleep", "100"], user=ada.uid)
    try:
        for moment in ("RunDir.load_own_config", "cluster_launcher.job_of"):
            mine = run_of(ada, f"cancel-{moment}", state="running")
            theirs = run_of(
                eve, f"theirs-{moment}", state="running", job=str(other.pid)
            )
            eve.write(
                theirs.submitit / "pid.json", to_json(local.Process.of(other.pid))
            )
            theirs.path.rename(mine.path.with_name("theirs"))
            code = f"""
import os
from slurmft.cluster import wait
from slurmft.cluster.wait import RunDir, cluster_launcher
original = {moment}
def call_and_swap(run):
    value = original(run) if {moment == "RunDir.load_own_config"} else None
    os.rename(mine, mine + "-aside")
    os.rename(os.path.join(os.path.dirname(mine), "theirs"), mine)
    return value or original(run)
mine = {str(mine.path)!r}
{moment} = call_and_swap
print(wait.cancel(RunDir.open(mine)))
"""
            ada.run(sys.executable, "-c", code)
            assert os.stat(mine.path).st_uid == eve.uid
            assert other.poll() is None
        studies = ada.home / "cancelled-studies"
        text = 'name = "c"\n[fixed]\ntask = "synthetic"\n[grid]\nnodes = [1]\n'
        ada.write(studies / "c" / "study.toml", text)
        mine.path.rename(studies / "theirs-run")
        ada.own(studies / "c")
        eve.write(studies / "theirs" / "runs" / "x", "")
        (studies / "theirs-run").rename(studies / "theirs" / "runs" / "run-1")
        code = f"""
import os
from slurmft.plugins.studies.commands import study
find_runs = study.study_folder.find_runs
def swap_and_find(folder):
    os.rename("c", "mine")
    os.rename("theirs", "c")
    return find_runs(folder)
study.study_folder.find_runs = swap_and_find
os.chdir({str(studies)!r})
study.main(["cancel", "c"])
"""
        ada.python(code)
        assert os.stat(studies / "c").st_uid == eve.uid
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@attack(
    GROUP,
    "puts a link to another folder of yours in the place of a run, or of a file in it, while "
    "slurmft writes there",
    "not followed; your files stay",
)
def links_where_a_run_writes(ada: User, eve: User) -> None:
    home = ada.home / "notes-2"
    for name in ("state.json", "records.jsonl", "rank-000.log"):
        ada.write(home / name, "mine")
    ada.own(home)
    run = ada.home / "runs" / "linked-run"
    ada.write(run.parent / "x", "")
    link(eve, run, home)
    link(eve, run.parent / "rank-000.log", home / "rank-000.log")
    code = f"""
from slurmft.core import files
from slurmft.runs import records
from slurmft.runs.rundir import RunDir
run = RunDir(__import__("pathlib").Path({str(run)!r}))
run.set_state("running")
records.warn(run.records, "a warning")
try: files.open_to_append(run.path.parent / "rank-000.log")
except OSError as error: print(error)
"""
    assert "Too many levels of symbolic links" in ada.python(code)
    assert {path.read_text() for path in home.iterdir()} == {"mine"}


_SBATCH = """#!/bin/bash
# sbatch, while others put a run of theirs in the place of the one that it is to start
for last; do :; done
cd "$HOME/submissions"
run=$(ls)
mv "$run" aside && mv ../their-run "$run"
for script in aside/submitit/.submission*; do
  echo 'touch "$HOME/attacked"' > "$run/submitit/${script##*/}"
done
cp "$last" "$HOME/submitted"
echo Submitted batch job 4711
"""


@attack(
    GROUP,
    "puts a run directory of theirs, with a script of theirs, in the place of yours while you "
    "submit it",
    "Slurm gets your script",
)
def script_of_a_submission(ada: User, eve: User) -> None:
    theirs = eve.write(ada.home / "their-run" / "submitit" / "x", "").parent
    theirs.chmod(0o777)
    runs = ada.write(ada.home / "submissions" / "x", "").parent
    (runs / "x").unlink()
    os.chown(runs, ada.uid, 21100)
    runs.chmod(0o2775)
    ada.write(ada.home / "fake" / "sbatch", _SBATCH, 0o755)
    for name in ("squeue", "scontrol", "sinfo", "sacct", "srun"):
        ada.write(ada.home / "fake" / name, "#!/bin/bash\n", 0o755)
    words = ("submit", "--cluster", "slurm", "--runs-dir", str(runs))
    path = f"{ada.home}/fake:{os.environ['PATH']}"
    done = ada.slurmft(*words, "--setup", "echo of-ada", PATH=path)
    assert "Traceback" not in done.err
    assert "echo of-ada" in (ada.home / "submitted").read_text()


_SCONTROL = """#!/bin/bash
echo 'JobId=7 JobName=a Requeue=1 TimeLimit=01:00:00 OverSubscribe=OK Partition=p'
"""
_PREPARE = """#!/bin/bash
# slurmft, while others put a run of theirs in the place of the one that is prepared
{python} "$@"
cd "$HOME/prepared"
run=$(ls)
mv "$run" aside && mv ../their-prepared "$run"
"""


@attack(
    GROUP,
    "puts a run directory of theirs in the place of yours while a file of sbatch/ prepares it, or "
    "modules into the folder where you submit that",
    "your script runs, and nothing of theirs",
)
def script_of_a_prepared_run(ada: User, eve: User) -> None:
    attacked = ada.home / "attacked"
    theirs = ada.home / "their-prepared" / "submitit" / "job.sh"
    eve.write(theirs, f"touch {attacked}\n")
    theirs.parents[1].chmod(0o777)
    runs = ada.write(ada.home / "prepared" / "x", "").parent
    (runs / "x").unlink()
    os.chown(runs, ada.uid, 21100)
    runs.chmod(0o2775)
    python = _PREPARE.format(python=sys.executable)
    ada.write(ada.home / "fake" / "python", python, 0o755)
    ada.write(ada.home / "fake" / "scontrol", _SCONTROL, 0o755)
    here = eve.write(ada.home / "submit-here" / "slurmft" / "__init__.py", "").parent
    eve.write(here / "__main__.py", f"open({str(attacked)!r}, 'w')\n")
    file = REPOSITORY / "sbatch" / "multi_node.sbatch"
    done = ada.run(
        *("bash", "-c", f'cd {here.parent}; exec bash {file} "$@"', "bash"),
        *("--runs-dir", str(runs), "--setup", "echo of-ada; exit 3"),
        SLURMFT_PYTHON=str(ada.home / "fake" / "python"),
        PATH=f"{ada.home}/fake:{os.environ['PATH']}",
        SLURM_JOB_ID="7",
        SLURM_JOB_NUM_NODES="1",
        SLURM_NTASKS="1",
    )
    assert (done.code, done.out) == (3, "of-ada\n"), done.err
    assert not attacked.exists()


@attack(
    GROUP,
    "puts a run directory of theirs, with links to files of yours, in the place of one whose job "
    "runs, or whose task of a job array starts",
    "not followed; your files stay",
)
def links_where_a_script_writes(ada: User, eve: User) -> None:
    secret = ada.write(ada.home / "secret-of-scripts", "mine")
    place = ada.home / "scripts"
    place.mkdir()
    script = Script(place)
    srun = '#!/bin/bash\ncd "$STATE"; mv run aside; mv theirs run\n'
    (place / "bin" / "srun").write_text(srun)
    (place / "run" / "submitit").mkdir(parents=True)
    links = ("ended.json", "submitit/7_srun_log.err", "submitit/7_1_0_log.err")
    eve.write(place / "theirs" / "submitit" / "job.sh", "")
    for name in links:
        (place / "theirs" / name).symlink_to(secret)
    for folder in (place, place / "bin", place / "run"):
        ada.own(folder)
    eve.own(place / "theirs")
    started = ["env", *(f"{name}={value}" for name, value in script.env.items())]
    assert ada.run(*started, "bash", "-c", script.text).code == 0
    # The file's descriptor leads to the run that has begun, whatever its name is by now.
    assert (place / "aside" / "ended.json").is_file()
    # Nor one with the inode of the run that was examined, as theirs may be on another disk.
    (place / "bin" / "srun").write_text("#!/bin/bash\n")
    ada.run(*started, "bash", "-c", script.text)
    assert secret.read_text() == "mine"
    text = job_array.script_text(
        [], {run_of(ada, "array-2"): "", RunDir(place / "run"): ""}
    )
    task = ("SLURM_ARRAY_TASK_ID=1", "SLURM_ARRAY_JOB_ID=7")
    done = ada.run("env", *task, "bash", "-c", text)
    assert (done.code, done.err) == (
        1,
        f"refused: {place}/run/submitit is another user's, or others can write it\n",
    )
    assert secret.read_text() == "mine"


@attack(
    GROUP,
    "puts another folder of yours, or one of theirs, in the place of a run while its job writes "
    "model and checkpoints",
    "they are written into the run that the job has begun with; your folder stays",
)
def run_swapped_while_its_job_writes(ada: User, eve: User) -> None:
    run = run_of(ada, "written", state="running")
    thesis = ada.write(run.path.parent / "thesis" / "model" / "thesis.tex", "mine")
    ada.own(thesis.parents[1])
    secret = ada.write(ada.home / "secret", "mine")
    code = f"""
import os
from pathlib import Path
from slurmft.core import descent
from slurmft.core.files import new_folder
from slurmft.job.checkpoints import Checkpoints
from slurmft.runs.rundir import RunDir
path = Path({str(run.path)!r})
run = RunDir(path)
run.join()
os.rename(path, path.with_name("aside"))
os.rename(path.with_name("thesis"), path)
with new_folder(run.model) as folder:
    # What others can write there: links in the place of files that are about to be written.
    os.rename(path, path.with_name("thesis"))
    os.mkdir(path)
    os.mkdir(path / folder.name)
    os.symlink({str(secret)!r}, path / folder.name / "config.json")
    (descent.through(folder) / "config.json").write_text("a model")
with Checkpoints(run, None, 3).write("step-00000001") as folder:
    (descent.through(folder) / "state.json").write_text("a checkpoint")
run.set_state("finished")
print(run.get_state().state)
"""
    assert ada.python(code) == "finished\n"
    aside = run.path.with_name("aside")
    assert (aside / "model" / "config.json").read_text() == "a model"
    assert (aside / "checkpoints" / "step-00000001" / "manifest.json").is_file()
    assert (thesis.read_text(), secret.read_text()) == ("mine", "mine")


@attack(
    GROUP,
    "puts a repository of theirs, or another folder of yours, in the place of a temporary folder, "
    "where your TMPDIR, or the folder of a link to it, is theirs to write",
    "no temporary folder is made there",
)
def temporary_folders(ada: User, eve: User) -> None:
    shared = ada.write(ada.home / "shared-tmp" / "x", "").parent
    (shared / "x").unlink()
    os.chown(shared, ada.uid, 21100)
    shared.chmod(0o2775)
    ada.write(ada.home / "work" / "train.py", "")
    code = """
import os, subprocess, tempfile
os.chdir("work")
for words in (["init", "-q"], ["add", "."]): subprocess.run(["git", *words], check=True)
make = tempfile.mkdtemp
def noted(*arguments, **more):
    print(made := make(*arguments, **more))
    return made
tempfile.mkdtemp = noted
from pathlib import Path
from slurmft.core import git
from slurmft.node.watchdog import Watchdog
with git._private(Path.cwd()): pass
os.access = lambda place, mode: "shm" not in str(place) and os.path.isdir(place)
Watchdog(1.0, True).close()
"""
    disk = ada.own(ada.write(ada.home / "disk" / "x", "").parent)
    (shared / "link").symlink_to(disk)
    os.chown(shared / "link", ada.uid, ada.uid, follow_symlinks=False)
    for place in (shared, shared / "link"):
        made = ada.python(code, TMPDIR=str(place)).splitlines()
        assert [Path(folder).parent for folder in made] == [Path("/tmp")] * 2
    assert (os.listdir(shared), os.listdir(disk)) == (["link"], ["x"])


@attack(
    GROUP,
    "gives the name of a lock among your runs to a file of yours, before you submit",
    "it is no lock, and stays",
)
def file_as_a_lock(ada: User, eve: User) -> None:
    runs = ada.home / "locked-runs"
    mine = ada.write(runs / f".outputs-{ada.uid}", "three weeks of labels\n")
    ada.write(runs / ".request-abcdef", "more labels\n")
    os.chown(runs, ada.uid, 21100)
    runs.chmod(0o2775)
    ada.write(ada.home / "own.py", "")
    words = ("run", "--runs-dir", str(runs), "--cluster", "local")
    checkpoints = ("--checkpoint-dir", str(ada.home / "of-own"))
    ada.slurmft(*words, *checkpoints, "--", "own.py")
    assert mine.read_text() == "three weeks of labels\n"
    code = f"""
from pathlib import Path
from slurmft.runs import request
try:
    with request.alone(Path({str(runs)!r}), "abcdef"): print("locked")
except Exception as error: print(error)
"""
    assert "has the name of a lock, and is none" in ada.python(code)
    assert (runs / ".request-abcdef").read_text() == "more labels\n"


@attack(
    GROUP,
    "puts another run, or another study, of yours in the place of the one that you `resume` or "
    "`study run`, once it was looked at",
    "the one that was looked at goes on; the other stays",
)
def acted_on_what_was_checked(ada: User, eve: User) -> None:
    run = run_of(ada, "checked")
    other = run_of(ada, "checked-other")
    before = other.state.read_text()
    ada.write(ada.home / "checked-study" / "study.toml", "")
    ada.write(ada.home / "checked-study-2" / "study.toml", "mine")
    code = f"""
import os
from pathlib import Path
from types import SimpleNamespace
from slurmft.cluster import submit
from slurmft.plugins.studies import folder as studies
from slurmft.runs.rundir import RunDir
def swap(path, other):
    os.rename(path, str(path) + ".aside")
    os.rename(other, path)
run, home = Path({str(run.path)!r}), Path({str(ada.home)!r})
check = submit._resumed
def check_and_swap(*arguments, **more):
    checked = check(*arguments, **more)
    swap(run, {str(other.path)!r})
    return checked
submit._resumed = check_and_swap
submit._submit_job = lambda config, run, cluster: "4712"
submit.resume(RunDir(run), {{"cluster": "local"}}, submit.provenance("resume", []))
study = home / "checked-study"
with studies.exclusive(study):
    swap(study, home / "checked-study-2")
    text = SimpleNamespace(path=home / "x.toml", text="theirs", published=None)
    studies.keep_copies(text, study)
"""
    ada.python(code)
    assert RunDir(run.path.with_name("checked.aside")).get_state().state == "submitted"
    assert (run.path / "state.json").read_text() == before
    assert not (run.path / "resume.lock").exists()
    assert (ada.home / "checked-study" / "study.toml").read_text() == "mine"


@attack(
    GROUP,
    "gives the name of what slurmft is about to remove to another folder of yours: the lock of a "
    "command of `--on`, a file that could not be written to its end, a checkpoint of Trainer's",
    "left",
)
def removed_by_name(ada: User, eve: User) -> None:
    project = ada.write(ada.home / "removals" / "x", "").parent
    for name in ("lock", "half", "thesis"):
        ada.write(project / name / "thesis.tex", "mine")
    for name in ("slurmft-mark.txt", "trainer_state.json"):
        ada.write(project / "checkpoint-3" / name, "{}")
    ada.own(project)
    os.chown(project, ada.uid, 21100)
    project.chmod(0o2775)
    code = """
import os
from pathlib import Path
from slurmft.core import files
from slurmft.runs import request
place = Path("removals").absolute()
with request.alone(place, "abcdef"):
    os.rename(place / ".request-abcdef", place / "aside")
    os.rename(place / "lock", place / ".request-abcdef")
replace = os.replace
def swap_and_replace(*names, **folders):
    (half,) = place.glob(".report.slurmft-*")
    os.rename(half, place / "aside")
    os.rename(place / "half", half)
    replace(*names, **folders)
os.replace = swap_and_replace
(place / "report").touch()
try: files.write_text(place / "report", "text")
except OSError as error: print(error)
from slurmft.plugins.integrations import transformers
trainers = place / "checkpoint-3"
look = transformers._signature
signature = look(trainers)
# The thesis has the name only while slurmft looks whose folder it is, and again when it goes.
os.rename(trainers, place / "of-trainer")
os.rename(place / "thesis", trainers)
def swap_and_look(folder):
    os.rename(trainers, place / "thesis")
    os.rename(place / "of-trainer", trainers)
    signature = look(folder)
    os.rename(trainers, place / "of-trainer")
    os.rename(place / "thesis", trainers)
    return signature
transformers._signature = swap_and_look
transformers._remove(trainers, signature)
"""
    ada.python(code)
    assert len(list(project.glob("*/thesis.tex"))) == 3


@attack(
    GROUP,
    "gives the name of your run to another folder of yours once `clean` has looked at it",
    "left",
)
def swapped_while_cleaned(ada: User, eve: User) -> None:
    runs = ada.home / "swapped-clean"
    run = write_run(runs / "old-1", state="finished")
    ada.write(run.model / "model.safetensors", "")
    ada.write(run.checkpoints / "step-00000010" / "file", "mine")
    thesis = ada.write(runs / "project" / "checkpoints" / "thesis", "mine")
    ada.write(runs / "project" / "model" / "mine", "")
    ada.own(runs)
    code = f"""
import os
from pathlib import Path
from slurmft.cluster import cleanup
runs = Path({str(runs)!r})
look = cleanup._guarded_inode
def look_and_swap(run):
    inode = look(run)
    if (runs / "project").exists():
        os.rename(run, runs / "aside")
        os.rename(runs / "project", run)
    return inode
cleanup._guarded_inode = look_and_swap
plan = cleanup.plan(runs, ["checkpoints"], 0)
print([cleanup.remove(item) for item in plan.items])
"""
    ada.python(code)
    assert (run.path / "checkpoints" / "thesis").exists()
    assert not thesis.exists()


@attack(
    ANYBODY,
    "calls a run directory `$(command)`, before you press TAB",
    "not offered; nothing runs",
)
def completion(ada: User, eve: User) -> None:
    run_of(eve, "$(touch attacked)")
    site = ada.write(ada.home / "site.toml", f'runs_dir = "{eve.home}/runs"\n')
    script = ada.slurmft("completion", "bash", SLURMFT_SITE=str(site)).out
    words = "COMP_WORDS=(slurmft status ''); COMP_CWORD=2; _shtab_slurmft; echo ${COMPREPLY[*]}"
    done = ada.run("bash", "-c", f"{script}\n{words}")
    assert "last" in done.out, done.err
    assert not (ada.home / "attacked").exists()


@attack(
    ANYBODY, "has runs that you look at: `status`, `list`, `logs`, `follow`", "shown"
)
def reading(ada: User, eve: User) -> None:
    run = run_of(eve, "shown-1", state="finished")
    for command in ("status", "logs", "follow"):
        done = ada.slurmft(command, str(run.path))
        assert done.code == 0, done.err
    assert "shown-1" in ada.slurmft("list", "--runs-dir", str(run.path.parent)).out


@attack(
    ANYBODY,
    "puts FIFOs, links to devices, and files of a terabyte, of one long line or of a million lists "
    "into runs of theirs, in a folder that you `list`, `report` or `clean`",
    "your runs are shown at once; each of theirs has a line that says why not",
)
def unreadable(ada: User, eve: User) -> None:
    runs = ada.home / "both"
    run_of(ada, "mine-1", state="finished").path.rename(ada.home / "mine-1")
    for kind, put in NO_FILES.items():
        for file in ("config.json", "state.json", "records.jsonl"):
            run = write_run(runs / f"{kind}-{file}", state="failed")
            (run.path / file).unlink()
            put(run.path / file)
    eve.own(runs)
    (ada.home / "mine-1").rename(runs / "mine-1")
    where = ("--runs-dir", str(runs))
    begin = time.monotonic()
    for command in (
        ("list", *where),
        ("clean", "--dry-run", *where),
        ("report", str(runs)),
    ):
        done = ada.slurmft(*command)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err
        if command[0] == "list":
            assert "mine-1" in done.out
            assert "warning: left out: " in done.err
    assert time.monotonic() - begin < PATIENCE_S


@attack(
    ANYBODY,
    "writes escape sequences into the names, records and logs of a run that you look at",
    r"printed as text: `\u001b]0;...`",
)
def escapes(ada: User, eve: User) -> None:
    evil = "\x1b]52;c;Y3VybA==\x07\x9b2J"
    run = run_of(eve, f"escapes-1{evil}", model=evil)
    eve.write(run.rank_log(0), evil)
    eve.write(
        run.state,
        json.dumps({"state": "failed", "time": 1, "reason": evil, "exit_code": 1}),
    )
    where = ("--runs-dir", str(run.path.parent))
    for command in (
        ("list",),
        ("status", "escapes"),
        ("logs", "escapes"),
        ("resume", "escapes"),
    ):
        done = ada.slurmft(*command, *where)
        assert not {"\x1b", "\x07", "\x9b"} & set(done.out + done.err), command
        assert "]52;c" in done.out + done.err


# --- kept tokens ----------------------------------------------------------------------------------

KEY = "0" * 32


def take(user: User, cache: Path, into: Path) -> str:
    into.mkdir()
    user.own(into)
    code = (
        "from pathlib import Path; from slurmft.train import token_cache\n"
        f"try: print(token_cache.take(Path({str(cache)!r}), {KEY!r}, Path({str(into)!r})))\n"
        "except Exception as error: print(error)"
    )
    return user.python(code).splitlines()[0]


def plant(user: User, cache: Path, files: dict[str, str]) -> Path:
    """An entry with its sums."""
    entry = cache / KEY
    user.write(cache / "slurmft-token-cache", "")
    for name, text in files.items():
        user.write(entry / name, text)
    sums = {name: fingerprint(entry / name) for name in files}
    user.write(entry / "sums.json", json.dumps(sums))
    return entry


@attack(
    ANYBODY,
    "plants kept tokens in a shared `HF_HOME`, whose sums name `a/../../../file`",
    "not used: every user has tokens of their own; a line in the log",
)
def tokens_of_another(ada: User, eve: User) -> None:
    precious = ada.write(ada.home / "run" / "precious", "mine")
    cache = eve.home / "hf" / f"slurmft-tokens-{ada.uid}"
    entry = plant(eve, cache, {"meta.json": "{}", "a/precious": "attacked"})
    eve.write(entry / "a" / "x", "")
    names = {"a/../../precious": fingerprint(entry / "a" / "precious")}
    eve.write(entry.parent.parent / "precious", "attacked")
    write_json(entry / "sums.json", names)
    eve.write(cache / "precious", "attacked")
    into = ada.home / "run" / "tokens"
    assert f"'{cache}' belongs to eve" in take(ada, cache, into)
    assert precious.read_text() == "mine"
    assert list(into.iterdir()) == []


@attack(
    GROUP,
    "does so in a cache of yours whose mode allows it; also with links, FIFOs, files of their own",
    "not used; nothing is written elsewhere",
)
def tokens_in_an_open_cache(ada: User, eve: User) -> None:
    precious = ada.write(ada.home / "open" / "precious", "mine")
    for number, (name, kind) in enumerate(
        (("a/../../precious", "file"), ("/tmp/x", "file"), ("meta.json", "link"),
         ("meta.json", "fifo"), ("meta.json", "eve's"))
    ):  # fmt: skip
        cache = ada.home / "open" / f"cache-{number}"
        entry = plant(ada, cache, {"meta.json": "attacked"})
        ada.write(cache / "precious", "attacked")
        (entry / "a").mkdir()
        write_json(entry / "sums.json", {name: fingerprint(entry / "meta.json")})
        ada.own(cache)
        if kind == "link":
            (entry / "meta.json").rename(cache / "elsewhere")
            (entry / "meta.json").symlink_to(cache / "elsewhere")
        elif kind == "fifo":
            (entry / "meta.json").unlink()
            os.mkfifo(entry / "meta.json")
            os.chown(entry / "meta.json", ada.uid, ada.uid)
        elif kind == "eve's":
            os.chown(entry / "meta.json", eve.uid, eve.uid)
        into = ada.home / "open" / f"into-{number}"
        assert take(ada, cache, into) not in ("True", "False"), (name, kind)
        assert list(into.iterdir()) == []
        assert precious.read_text() == "mine"
        entry = plant(ada, cache.with_name(f"writable-{number}"), {"meta.json": "{}"})
        entry.chmod(0o777)
        assert "is open to others" in take(
            ada, entry.parent, into.with_name(f"next-{number}")
        )


@attack(
    GROUP,
    "puts a link to a folder of yours, another folder of yours, or one of theirs, in the place of "
    "your kept tokens",
    "nothing is kept there, and nothing in it removed",
)
def cache_that_is_a_link(ada: User, eve: User) -> None:
    precious = ada.write(ada.home / "letters" / "one" / "x", "mine")
    os.utime(precious.parent, (0, 0))
    ada.write(ada.home / "theses" / "one" / "meta.json", "mine")
    os.utime(ada.home / "theses" / "one", (0, 0))
    ada.write(ada.home / "tokens" / "meta.json", "{}")
    hf = eve.home / "shared"
    for name, target in (
        ("link", ada.home / "letters"),
        ("folder", eve.home / "open"),
        ("own", ada.home / "theses"),
    ):
        target.mkdir(exist_ok=True)
        eve.write(hf / name / "x", "")
        cache = hf / name / "tokens"
        if name == "link":
            cache.symlink_to(target)
        elif name == "own":
            target.chmod(0o700)
            target.rename(cache)
        else:
            eve.own(target).chmod(0o777)
            target.rename(cache)
        code = (
            "from pathlib import Path; from slurmft.train import token_cache\n"
            f"cache = Path({str(cache)!r})\n"
            f"try: token_cache.keep(cache, {KEY!r}, Path('tokens').absolute())\n"
            "except Exception as error: print('refused')\n"
            "print(list(token_cache.unused(cache, 0)))"
        )
        assert ada.python(code) == "refused\n[]\n", name
        assert not (cache / KEY).exists()
    assert precious.exists()
    assert (hf / "own" / "tokens" / "one" / "meta.json").exists()


@attack(
    GROUP,
    "puts a link, or a folder of theirs, in the place of the code of your last run, or opens yours",
    "its code is not shared: the next run has files of its own",
)
def code_before(ada: User, eve: User) -> None:
    program = ada.write(ada.home / "own" / "x.py", "mine")
    for place in ("theirs", "open", "link"):
        owner = ada if place == "open" else eve
        runs = ada.home / f"code-{place}"
        before = runs / "run-20200101-000000-a" / "code"
        code = eve.home / "store" if place == "link" else before
        ada.own(ada.write(runs / "x", "").parent)
        owner.write(code / "x.py", "mine").chmod(0o666 if place == "open" else 0o444)
        owner.own(code)
        before.parent.mkdir(exist_ok=True)
        if place == "link":
            before.symlink_to(code)
        assert taken_by(ada, program, runs) == "mine 1\n", place
    runs = ada.own(ada.write(ada.home / "code" / "x", "").parent)
    # Nor does a run share files with the one before that is its own.
    assert [taken_by(ada, program, runs) for _ in range(2)] == ["mine 1\n", "mine 1\n"]


# --- scripts of metrics ---------------------------------------------------------------------------


@attack(
    GROUP,
    "plants the script of a metric that you name with `--metric`, in a shared `HF_HOME`",
    "refused; nothing of it runs",
)
def metric_in_a_shared_cache(ada: User, eve: User) -> None:
    code = (
        "from slurmft.train.metric_spec import MetricSpec\n"
        "from slurmft.train.tasks.evaluate_metrics import EvaluateMetric\n"
        "try: EvaluateMetric.load(MetricSpec.parse('planted'))\n"
        "except Exception as error: print(error)"
    )
    attacked = "print('attacked')"
    # Hers; and one of Ada's that a group can write, with a file of Eve's.
    for owner, folder_mode in ((eve, 0o755), (ada, 0o775)):
        home = owner.home / "shared metrics"
        place = home / "modules/evaluate_modules/metrics/evaluate-metric--planted"
        script = owner.write(place / ("a" * 64) / "planted.py", attacked)
        for folder in script.parents:
            if folder.is_relative_to(home / "modules"):
                owner.write(folder / "__init__.py", attacked)
        if owner is ada:
            script.parent.chmod(folder_mode)
            os.chown(script, eve.uid, eve.uid)
        printed = ada.python(code, HF_HOME=str(home), HF_HUB_OFFLINE="1")
        assert "attacked" not in printed
        assert "the script of a metric is code: refused" in printed


@attack(
    GROUP,
    "puts a link to a folder of yours into a shared `HF_HOME`, where evaluate copies the script of "
    "a metric of yours",
    "refused; nothing is copied there",
)
def links_in_the_cache_of_metrics(ada: User, eve: User) -> None:
    thesis = ada.write(ada.home / "thesis-of-metrics" / "thesis.tex", "mine")
    script = ada.write(ada.home / "mine" / "mine.py", "import evaluate\n")
    modules = eve.write(eve.home / "cache with links" / "modules" / "x", "").parent
    modules.chmod(0o777)
    link(eve, modules / "evaluate_modules", thesis.parent)
    code = (
        "from slurmft.train.metric_spec import MetricSpec\n"
        "from slurmft.train.tasks.evaluate_metrics import EvaluateMetric\n"
        f"try: EvaluateMetric.load(MetricSpec.parse({str(script.parent)!r}))\n"
        "except Exception as error: print(error)"
    )
    home = str(modules.parent)
    printed = ada.python(code, HF_HOME=home, HF_HUB_OFFLINE="1")
    assert "the script of a metric is code: refused" in printed
    assert names_in(thesis.parent) == {"thesis.tex"}


# --- the door -------------------------------------------------------------------------------------

DOOR = """
import os
from pathlib import Path
from slurmft.core.trusted import Door
door = Door("it", "", "")

def opened(path):
    try:
        return door.read(Path(path)).decode()
    except Exception as error:
        return repr(str(error))
"""
"""The beginning of a program that opens something as the toolkit does."""


def opened(user: User, *paths: Path) -> list[str]:
    """What comes of reading files through the door: their content, or the error."""
    names = [str(path) for path in paths]
    return user.python(
        f"{DOOR}\nfor path in {names!r}: print(opened(path))"
    ).splitlines()


def file_of(user: User, folder: Path, name: str = "config.json") -> Path:
    """A file that nobody else can write."""
    path = user.write(folder / name, user.name)
    folder.chmod(0o755)
    return path


@attack(
    GROUP,
    "puts a link, FIFO, device, folder or file of theirs in the place of what decides what runs",
    "refused at once, with the file and its owner",
)
def kinds_of_files(ada: User, eve: User) -> None:
    top = ada.home / "kinds"
    good = file_of(ada, top)
    link = top / "link"
    link.symlink_to(good)
    fifo = top / "fifo"
    os.mkfifo(fifo, 0o644)
    device = top / "device"
    os.mknod(device, stat.S_IFCHR | 0o644, os.makedev(1, 5))  # /dev/zero
    folder = top / "folder"
    folder.mkdir()
    ada.own(top)
    theirs = file_of(eve, top, "theirs")
    names = file_of(ada, top, "two\nlines \x1b]0;x\x07")
    names.chmod(0o666)
    expected = {
        good: "ada",
        link: "is a link",
        fifo: "is not a regular file",
        device: "is not a regular file",
        folder: "is not a regular file",
        theirs: f"belongs to eve (uid {eve.uid})",
    }
    lines = opened(ada, *expected, names)
    for line, (path, word) in zip(lines[:-1], expected.items(), strict=True):
        assert word in line, (path, line)
        assert path == good or str(path) in line
    assert "others can write" in lines[-1]
    assert "\x1b" not in lines[-1]


@attack(
    GROUP,
    "puts a link to a folder of theirs in the place of any folder on the way to it; or the folder "
    "has the setgid bit, or a list that lets them write",
    "what was opened is examined: refused",
)
def links_on_the_way(ada: User, eve: User) -> None:
    parts = ("a", "b", "c")
    paths = []
    for number in range(len(parts)):
        top = ada.home / f"way-{number}"
        path = file_of(ada, top.joinpath(*parts))
        theirs = eve.home / f"way-{number}"
        file_of(eve, theirs.joinpath(*parts[number:]))
        component = top.joinpath(*parts[: number + 1])
        component.rename(component.with_name("aside"))
        component.symlink_to(theirs / parts[number])
        paths.append(path)
    assert all("belongs to eve" in line for line in opened(ada, *paths))
    setgid = file_of(ada, ada.home / "setgid")
    setgid.parent.chmod(0o2775)
    listed = file_of(ada, ada.home / "listed")
    let_write(listed.parent, eve)
    assert all("others can write" in line for line in opened(ada, setgid, listed))


def let_write(folder: Path, user: User, attribute: str = "access") -> None:
    """Gives a folder an access control list by which a user may write, as setfacl does."""
    nobody = 2**32 - 1
    entries = [
        (1, 7, nobody),
        (2, 7, user.uid),
        (4, 5, nobody),
        (16, 7, nobody),
        (32, 5, nobody),
    ]
    packed = [struct.pack("<HHI", *entry) for entry in entries]
    value = struct.pack("<I", 2) + b"".join(packed)
    os.setxattr(folder, f"system.posix_acl_{attribute}", value)


@attack(
    GROUP,
    "swaps the file, or a folder on the way, while it is looked at: after each call",
    "what was opened is what is used: yours, or refused",
)
def swapped_while_checked(ada: User, eve: User) -> None:
    names = ("a", "a/b", "a/b/config.json")
    theirs = eve.home / "swapped"
    file_of(eve, theirs / "a" / "b")
    top = ada.own(ada.write(ada.home / "swapped" / "x", "").parent)
    code = f"""
os.umask(0o022)
calls = {{"open": os.open, "fstat": os.fstat}}
for name in {names!r}:
    for call, real in calls.items():
        for count in range(14):
            top = Path({str(top)!r}, f"{{call}}-{{count}}-{{len(name)}}")
            (top / "a/b").mkdir(parents=True)
            (top / "a/b/config.json").write_text("ada")
            left = [count]
            def swap(*args, **kwargs):
                result = real(*args, **kwargs)
                left[0] -= 1
                if left[0] == -1:
                    os.rename(top / name, top / "aside")
                    os.symlink(Path({str(theirs)!r}, name), top / name)
                return result
            setattr(os, call, swap)
            print(opened(top / "a/b/config.json"))
            setattr(os, call, real)
"""
    lines = ada.python(DOOR + code).splitlines()
    refused = [
        line for line in lines if "is a link" in line or "belongs to eve" in line
    ]
    assert refused
    assert {line for line in lines if line not in refused} == {"ada"}


@attack(
    GROUP,
    "lets a file of yours that decides what runs grow without end",
    "no more of it is read than it can have",
)
def endless_file(ada: User, eve: User) -> None:
    path = file_of(ada, ada.home / "endless")
    os.truncate(path, 2**40)
    begin = time.monotonic()
    (line,) = opened(ada, path)
    assert "larger than 8" in line
    assert time.monotonic() - begin < PATIENCE_S


# --- frozen code ----------------------------------------------------------------------------------


@attack(
    GROUP,
    "changes the code of your run, which is open to them, or puts a link, FIFO or file there",
    "each start compares it with the sums of the submission: refused, with the file",
)
def frozen_code(ada: User, eve: User) -> None:
    program = file_of(ada, ada.home / "program", "x.py")
    file_of(ada, program.parent / "package", "module.py")
    file_of(eve, eve.home, "x.py")
    file_of(eve, eve.home / "package", "module.py")
    runs = ada.own(ada.write(ada.home / "frozen" / "x", "").parent)
    code = f"""
import os
from pathlib import Path
from types import SimpleNamespace
from slurmft.core.program import Program
from slurmft.programs import snapshot
from slurmft.runs import frozen_code
from slurmft.runs.rundir import RunDir
os.umask(0o077)

def change(name):
    mode = (run.code / name).stat().st_mode
    (run.code / name).chmod(0o644)
    (run.code / name).write_text("changed")
    (run.code / name).chmod(mode)

def swap(name):
    os.rename(run.code / name, run.path / "aside")
    os.symlink(Path({str(eve.home)!r}, name), run.code / name)

def pipe():
    (run.code / "x.py").unlink()
    os.mkfifo(run.code / "x.py", 0o644)

CASES = {{
    "written beside": lambda: (run.code / "notes").touch(0o666),
    "changed": lambda: change("package/module.py"),
    "gone": lambda: (run.code / "x.py").unlink(),
    "open": lambda: (run.code / "x.py").chmod(0o666),
    "open folder": lambda: (run.code / "package").chmod(0o777),
    "open cache": lambda: (run.code / "package/__pycache__").chmod(0o777),
    "link": lambda: swap("x.py"),
    "link of a folder": lambda: swap("package"),
    "FIFO": pipe,
    "sums": lambda: run.code_sums.write_text(run.code_sums.read_text() + " "),
    "no sums": lambda: run.code_sums.unlink(),
}}
os.chdir({str(program.parent)!r})
found = snapshot.source(Path({str(program)!r}))
for name, change_run in CASES.items():
    run = RunDir(Path({str(runs)!r}, name))
    run.path.mkdir()
    facts = snapshot.take(found, run)
    change_run()
    program = Program(kind="mine", name="x", module="x")
    config = SimpleNamespace(
        program=program, submission=SimpleNamespace(snapshot=facts)
    )
    try:
        frozen_code.check(run, config)
        print(f"{{name}}: as it was")
    except Exception as error:
        print(f"{{name}}: {{error!r}}")
"""
    lines = dict(line.split(": ", 1) for line in ada.python(code).splitlines())
    assert lines.pop("written beside") == "as it was"
    for name, line in lines.items():
        words = "since the submission"
        if name.startswith("open"):
            words = "others can write"
        if name in ("link", "FIFO"):
            words = {"link": "is a link", "FIFO": "is not a regular file"}[name]
        assert words in line, (name, line)
        assert str(runs) in line


@attack(
    ANYBODY,
    "has a training with a task of their own, whose model you use by `predict`",
    "refused; nothing of it runs",
)
def predict(ada: User, eve: User) -> None:
    run = run_of(eve, "trained-1", state="finished")
    eve.write(run.model / "model.safetensors", "")
    eve.write(run.code / "evil.py", f"open('{ada.home}/attacked', 'w')")
    config = json.loads(run.config.read_text())
    config["program"]["code"] = str(run.code)
    config["program"]["settings"]["task"] = "evil:Task"
    run.config.write_text(json.dumps(config))
    rows = ada.write(ada.home / "rows.csv", "text\nhello\n")
    assert_refused(
        ada.slurmft("predict", str(run.path), str(rows)), f"'{run.path}' belongs to eve"
    )
    assert not (ada.home / "attacked").exists()


def assert_no_start(ada: User, run: RunDir, fact: str) -> None:
    """Neither `resume` nor a process of the job starts a run."""
    done = ada.slurmft("resume", str(run.path), "--cluster", "local")
    assert_refused(done, fact)
    for words in (
        ("-m", "slurmft.node.task", str(run.path)),
        ("-m", run.load_config().program.module, str(run.path)),
    ):
        done = ada.run(
            sys.executable, *words, SLURM_JOB_NODELIST="n1", SLURM_JOB_ID="1"
        )
        assert done.code != 0
        assert fact in done.err
    assert run.get_state().state == "failed"
    assert not (ada.home / "attacked").exists()


@attack(
    GROUP,
    "puts a run of theirs in the place of the training whose task your `predict` executes, before "
    "its job starts, or you `resume` it",
    "refused; nothing of it runs",
)
def training_of_a_prediction(ada: User, eve: User) -> None:
    trained = run_of(eve, "trained-2", state="finished")
    eve.write(trained.code / "evil.py", f"open('{ada.home}/attacked', 'w')")
    run = run_of(ada, "predict-2")
    config = json.loads(run.config.read_text())
    config["program"] |= {"kind": "predict", "code": str(trained.code)}
    config["program"]["settings"] |= {
        "task": "evil:Task",
        "model": str(trained.model),
    }
    run.config.write_text(json.dumps(config))
    assert_no_start(ada, run, f"'{trained.path}' belongs to eve")


@attack(
    GROUP,
    "puts an environment of theirs where `--env uv` keeps that of your run, before its job starts, "
    "or you `resume` it",
    "refused; nothing of it runs",
)
def environment_of_a_run(ada: User, eve: User) -> None:
    run = run_of(ada, "uv-1")
    kept = run.path.parent / f".envs-{ada.uid}"
    script = f"#!/bin/sh\ntouch {ada.home}/attacked\n"
    python = eve.write(kept / "key" / "bin" / "python", script, 0o755)
    words = (str(python), "-c", "pass")
    own = OwnProgram(argv=words, folder=str(ada.home), file="", per="process")
    own = dataclasses.replace(own, env=str(kept / "key"))
    config = run.load_config()
    config = dataclasses.replace(config, program=own.program("uv"))
    run.config.write_text(config.to_json())
    assert_no_start(ada, run, f"'{kept}' belongs to eve")
    # The batch script asks that Python for its packages.
    begin = f"""
from slurmft.runs import attempts, rundir
attempts.begin(rundir.RunDir.open({str(run.path)!r}), ["n1"], "1")
"""
    done = ada.run(sys.executable, "-c", begin)
    assert f"'{kept}' belongs to eve" in done.err
    assert not (ada.home / "attacked").exists()


@attack(
    GROUP,
    "puts a run of theirs in the place of yours while you `resume` it, with a link to a file of "
    "yours as its lock",
    "not followed; your file stays",
)
def link_as_the_lock_of_a_run(ada: User, eve: User) -> None:
    run = run_of(eve, "locked-1")
    run.path.chmod(0o777)
    thesis = ada.write(ada.home / "thesis", "mine")
    (run.path / "resume.lock").symlink_to(thesis)
    code = f"""
import pathlib
from slurmft import locks
from slurmft.core.errors import SlurmftError
try:
    locks.hold(pathlib.Path({str(run.path / "resume.lock")!r}))
except SlurmftError as error:
    print(error.message)
"""
    eve.own(run.path)
    assert "which belongs to eve (uid 21002), has the name of a lock" in ada.python(
        code
    )
    assert thesis.read_text() == "mine"


@attack(
    GROUP,
    "writes into the script of a task of your job array, or into its folder, whose mode allows it, "
    "or puts a FIFO in the place of the folder",
    "the task ends with a line; nothing of it runs",
)
def open_script_of_an_array(ada: User, eve: User) -> None:
    run = run_of(ada, "array-1")
    submitted = f"cat >/dev/null\ntouch {ada.home}/submitted\n\n"
    text = job_array.script_text([], {run_of(ada, "array-0"): "", run: submitted})
    for script in (f"touch {ada.home}/attacked", f"{submitted}\n", "", submitted[:-1]):
        ada.write(run.script, script, 0o777)
        done = ada.run("bash", "-c", text, SLURM_ARRAY_TASK_ID="1")
        assert (done.code, done.err) == (
            1,
            f"refused: {run.script} is not the script that was submitted\n",
        )
    ada.write(run.script, submitted)
    assert ada.run("bash", "-c", text, SLURM_ARRAY_TASK_ID="1").code == 0
    assert (ada.home / "submitted").exists()
    assert not (ada.home / "attacked").exists()
    run.path.rename(run.path.with_name("array-1-aside"))
    os.mkfifo(run.path)
    done = ada.run("bash", "-c", text, SLURM_ARRAY_TASK_ID="1", timeout_s=30)
    assert "Not a directory" in done.err


# --- checkpoints, caches, lists -------------------------------------------------------------------


@attack(
    GROUP,
    "puts a checkpoint of theirs, or a file of theirs, into a run of yours that they can look into",
    "the run does not go on with it; with the owner",
)
def checkpoint_of_another(ada: User, eve: User) -> None:
    for number, owner in enumerate(("folder", "file", "open")):
        run = run_of(ada, f"checkpoints-{number}")
        path = run.checkpoints / "step-00000002"
        file = ada.write(path / "weights.safetensors", "")
        ada.write(path / "manifest.json", '{"files": {}}')
        if owner == "folder":
            os.chown(path, eve.uid, eve.uid)
        if owner == "file":
            os.chown(file, eve.uid, eve.uid)
        if owner == "open":
            path.chmod(0o777)
        code = (
            "from slurmft.job import checkpoints; from slurmft.runs.rundir import RunDir\n"
            f"run = RunDir.open({str(run.path)!r})\n"
            "try: print(checkpoints.newest(run, print))\n"
            "except Exception as error: print(repr(error))"
        )
        assert "refused, as it would decide what runs as ada" in ada.python(code)


@attack(
    GROUP,
    "puts a file with a time to come into your `--checkpoint-dir`, or where your "
    "`--finished-file` is to be",
    "what your run writes counts all the same; theirs does not",
)
def times_to_come(ada: User, eve: User) -> None:
    folder = ada.home / "times"
    checkpoint = ada.write(folder / "checkpoint-1" / "weights", "mine").parent
    later = time.time() + 1e6
    for path in (checkpoint / "theirs", folder / "finished"):
        eve.write(path, "")
        os.utime(path, (later, later))
    code = (
        "import os, time; from slurmft.programs.description import OwnProgram\n"
        f"own = OwnProgram(argv=('true',), file='true', folder={str(folder)!r},\n"
        "    checkpoint_dir='.', finished_file='finished').marked()\n"
        "print(own.since_ns < time.time_ns(), own.has_finished())\n"
        "os.makedirs('times/checkpoint-2')\n"
        "open('times/checkpoint-2/weights', 'w').write('x')\n"
        "print([path.name for path in own.checkpoints()])"
    )
    ada.own(folder.parent / "times" / "checkpoint-1" / "weights")
    assert ada.python(code) == "True False\n['checkpoint-2']\n"


@attack(
    GROUP,
    "puts a file of theirs where your `--result-file` or `--finished-file` is to be",
    "not taken; a warning of the run says whose it is",
)
def result_of_another(ada: User, eve: User) -> None:
    folder = ada.home / "results"
    code = (
        "from pathlib import Path; from slurmft.programs.description import OwnProgram\n"
        f"own = OwnProgram(argv=('true',), file='true', folder={str(folder)!r},\n"
        "    result_file='result', finished_file='finished')\n"
        "print(own.has_finished(), own.result() is not None)\n"
        "from slurmft.programs.kind import OwnProgramKind as Own\n"
        "try: print(Own(own.program('own', code='')).read_result())\n"
        "except LookupError as error: print(error)\n"
    )
    for user in (ada, eve):
        for name in ("result", "finished"):
            user.write(folder / name, '{"accuracy": 1.0}')
        is_own = user is ada
        facts, result = ada.python(code).splitlines()
        assert facts == f"{is_own} {is_own}"
        if is_own:
            assert result == "{'accuracy': 1.0}"
        else:
            assert "--result-file 'result' belongs to eve" in result


@attack(
    GROUP,
    "may write a checkpoint of your program by an access control list",
    "the run does not go on with it; with the `chmod` that helps",
)
def checkpoint_with_a_list(ada: User, eve: User) -> None:
    file = ada.write(ada.home / "listed" / "checkpoint-1" / "weights", "", 0o664)
    code = (
        "from pathlib import Path; from slurmft.programs import checkpoints\n"
        f"print(checkpoints.refusal(Path({str(file.parent)!r})))"
    )
    # The group is ada's alone: a umask of 002 is nothing to refuse.
    assert ada.python(code) == "None\n"
    let_write(file, eve)
    assert stat.S_IMODE(file.stat().st_mode) & 0o020
    assert "others can write" in ada.python(code)


@attack(
    ANYBODY,
    "makes /tmp/torchinductor_USER first, with compiled code for your ranks, and fills /tmp",
    "not used: ranks get a folder of yours",
)
def cache_of_compiled_code(ada: User, eve: User) -> None:
    top = ada.home / "tmp"
    top.mkdir()
    top.chmod(0o1777)
    planted = top / "torchinductor_ada"
    planted.mkdir()
    eve.own(planted).chmod(0o777)
    code = (
        "from slurmft.node import compile_cache\n"
        "for _ in range(2): print(compile_cache.variables({})['TORCHINDUCTOR_CACHE_DIR'])"
    )
    first, second = ada.python(code, TMPDIR=str(top)).splitlines()
    assert first == second != str(planted)
    status = Path(first).stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (ada.uid, 0o700)
    # Nor where they have filled /tmp, too, for the time that it takes.
    full = (
        "import errno; from slurmft.core import trusted\n"
        "def make_folder(*_): raise OSError(errno.ENOSPC, 'full')\n"
        "trusted.make_folder = make_folder\n"
    )
    Path(first).rename(top / "away")
    for each in ada.python(full + code, TMPDIR=str(top)).splitlines():
        assert Path(each).parent == top
        assert each != str(planted)


@attack(
    GROUP,
    "has a default list on the folder of your runs, or above, or on the disk to which your own "
    "link `checkpoints` leads, by which they may write what is made there",
    "neither run directories, the folders above them, nor checkpoints take it over",
)
def default_list(ada: User, eve: User) -> None:
    top = ada.own(ada.write(ada.home / "listed runs" / "x", "").parent)
    let_write(top, eve, "default")
    code = (
        "from pathlib import Path; from slurmft.core import permissions\n"
        "from slurmft.runs import request\n"
        f"run = Path({str(top)!r}, 'project', 'runs', 'run')\n"
        "permissions.make_folder(run, share_with_group=True)\n"
        f"runs = Path({str(top)!r}, 'by on', 'runs')\n"
        "with request.alone(runs, 'abcdef'):\n"
        "    permissions.make_folder(runs / 'run', share_with_group=True)\n"
        "permissions.settle(True)\n"
        "(run / 'checkpoints').mkdir(); (run / 'config.json').touch()"
    )
    ada.python(code)
    made = [path for path in top.rglob("*") if path.name != "x"]
    assert len(made) == 8
    disk = ada.own(ada.write(ada.home / "listed disk" / "x", "").parent)
    let_write(disk, eve, "default")
    # As a checkpoint: `checkpoints` may be a link of ada's to a larger disk.
    code = (
        "from pathlib import Path; from slurmft.core import files, permissions\n"
        "permissions.settle(True)\n"
        f"with files.new_folder(Path({str(disk)!r}, 'step-00000001')) as folder:\n"
        "    files.write_text(folder / 'manifest.json', '{}')\n"
    )
    ada.python(code)
    made += [path for path in disk.rglob("*") if path.name != "x"]
    assert len(made) == 10
    for path in made:
        assert not path.stat().st_mode & 0o022
        assert not os.listxattr(path)


@attack(
    ANYBODY,
    "makes the folder first in which Open MPI keeps its sessions, and puts a link to your home "
    "into it, before it removes what is there",
    "it keeps them in a folder of yours, of a random name",
)
def session_folder_of_open_mpi(ada: User, eve: User) -> None:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("Open MPI is not installed")
    planted = Path("/tmp", f"ompi.{os.uname().nodename}.{ada.uid}")
    planted.mkdir()
    try:
        eve.own(planted).chmod(0o777)
        code = (
            "import os, subprocess; from slurmft.plugins.mpirun import launcher\n"
            "mpirun = 'mpirun.openmpi'\n"
            "with launcher.session_folders(mpirun, os.environ):\n"
            "    base = os.environ['OMPI_MCA_orte_tmpdir_base']\n"
            "    print(base, oct(os.stat(base).st_mode), flush=True)\n"
            "    command = [mpirun, '-n', '1', 'printenv', 'PMIX_SERVER_TMPDIR']\n"
            "    subprocess.run(command, check=True)\n"
            "print(os.path.exists(base))"
        )
        (base, mode), (session,), (is_left,) = map(
            str.split, ada.python(code).splitlines()
        )
        assert session.startswith(f"{base}/")
        assert (mode, is_left) == ("0o40700", "False")
    finally:
        shutil.rmtree(planted)


@attack(
    ANYBODY,
    "listens where ssh would keep the connection that commands of `--on` share",
    "not used: each command has a connection of its own",
)
def socket_of_ssh(ada: User, eve: User) -> None:
    places = [
        ada.home / "runtime",
        ada.home / "runtime-open",
        ada.home / "runtime-theirs",
    ]
    for path, mode in zip(places, (0o700, 0o777, 0o755), strict=True):
        path.mkdir()
        ada.own(path).chmod(mode)
    eve.own(places[2])
    code = (
        "from slurmft.plugins.remote.connection import Connection\n"
        "from types import SimpleNamespace\n"
        "cluster = SimpleNamespace(ssh='true', host='x')\n"
        "connection = Connection.__new__(Connection)\n"
        "connection.cluster, connection._ssh = cluster, ['true']\n"
        "print(bool(connection._sharing()))"
    )
    printed = [ada.python(code, XDG_RUNTIME_DIR=str(path)) for path in places]
    assert printed == ["True\n", "False\n", "False\n"]


@attack(
    GROUP,
    "reads the Secret in the manifest that you `render` into a folder of the group",
    "the manifest is for you alone to read",
)
def manifest_in_a_shared_folder(ada: User, eve: User) -> None:
    folder = ada.home / "deploy of the group"
    folder.mkdir()
    ada.own(folder).chmod(0o777)
    profile = ada.write(ada.home / "profile", "mine")
    for name in ("job.yaml", "Dockerfile"):
        link(eve, folder / name, profile)
    what = ("--name", "job", "--image", "mine:1", "--claim", "runs")
    done = ada.slurmft("render", "kubernetes", *what, "--output", str(folder))
    assert done.code == 0, done.err
    assert eve.run("cat", str(folder / "job.yaml")).code != 0
    assert "kind: Secret" in ada.run("cat", str(folder / "job.yaml")).out
    assert profile.read_text() == "mine"


@attack(
    GROUP,
    "puts a link, a FIFO, another name of a file of yours, or a file of theirs in the place of the "
    "file of URLs of `--notify`, or of that with the secrets of an attempt by mpirun",
    "refused; no other file of yours is read",
)
def files_of_secrets(ada: User, eve: User) -> None:
    shared = ada.write(ada.home / "urls of the group" / "x", "").parent
    os.chown(shared, ada.uid, 21100)
    shared.chmod(0o2775)
    other = ada.write(ada.home / ".git-credentials", "https://ada:key@host", 0o600)
    good = ada.write(ada.home / "urls", "json://localhost", 0o600)
    for name, target in (("own", good), ("theirs", other)):
        (shared / name).symlink_to(target)
    (shared / "folder").symlink_to(other.parent)
    for name in ("theirs", "folder"):
        os.chown(shared / name, eve.uid, eve.uid, follow_symlinks=False)
    os.chown(shared / "own", ada.uid, ada.uid, follow_symlinks=False)
    os.mkfifo(shared / "fifo", 0o600)
    os.chown(shared / "fifo", ada.uid, ada.uid)
    linked = ada.write(ada.home / "other-urls", "json://other", 0o600)
    os.link(linked, shared / "linked")
    eve.write(shared / "hers", "json://elsewhere").chmod(0o644)
    names = ["own", "theirs", f"folder/{other.name}", "fifo", "linked", "hers"]
    secrets = run_of(ada, "by-mpirun").path / ".secrets.slurmft-0-0000"
    secrets.symlink_to(other)
    os.chown(secrets, eve.uid, eve.uid, follow_symlinks=False)
    code = f"""
from pathlib import Path
from slurmft.core.errors import SlurmftError
from slurmft.plugins.mpirun import rank
from slurmft.plugins.notify import notification
from slurmft.runs.rundir import RunDir
for name in {names!r}:
    try: print(notification._urls(f"file:{shared}/{{name}}"))
    except SlurmftError as error: print(error.message)
try: rank.secrets_of(RunDir(Path({str(secrets.parent)!r})))
except SlurmftError as error: print(error.message)
"""
    lines = ada.python(code).splitlines()
    words = (
        "['json://localhost']",
        f"the link '{shared}/theirs' belongs to eve",
        f"the link '{shared}/folder' belongs to eve",
        "is not a regular file",
        "has 2 names",
        "belongs to eve",
        "is a link",
    )
    for line, word in zip(lines, words, strict=True):
        assert word in line


# --- staged environments --------------------------------------------------------------------------


@attack(
    GROUP,
    "puts an archive of theirs where `--stage-env` keeps yours, before you submit",
    "not sent: yours is packed into a folder of another name, which is closed to others",
)
def packed_first(ada: User, eve: User) -> None:
    runs = ada.home / "staged runs"
    runs.mkdir()
    runs.chmod(0o1777)
    usual = runs / f".environments-{ada.uid}"
    code = (
        "import os; from pathlib import Path\n"
        "from slurmft.plugins.stage_env.unpack import ARCHIVE\n"
        f"place = ARCHIVE.place(Path({str(usual)!r}))\n"
        "with ARCHIVE.private(place) as private: print(place, sorted(os.listdir(private)))"
    )
    planted = eve.write(eve.home / "environments" / "x.tar", "attacked").parent
    for kind in ("folder", "link", "file", "open"):
        if kind == "folder":
            usual.mkdir()
            eve.own(eve.write(usual / "x.tar", "attacked").parent).chmod(0o777)
        elif kind == "link":
            usual.symlink_to(planted)
        elif kind == "file":
            eve.write(usual, "attacked")
        else:
            usual.mkdir()
            ada.own(usual).chmod(0o777)
            eve.write(usual / "x.tar", "attacked")
        place, _, content = ada.python(code).strip().rpartition(" ")
        assert place != str(usual)
        assert content == "['.slurmft-folder']"
        status = Path(place).stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (ada.uid, 0o700)
        usual.rename(runs / f"aside-{kind}")


@attack(
    GROUP,
    "gives the name of the folder for archives, or for environments of `--env uv`, to another "
    "folder of yours, such as a run that you have pulled",
    "not used: slurmft has not made it",
)
def packed_in_another_folder(ada: User, eve: User) -> None:
    runs = ada.home / "renamed environments"
    runs.mkdir()
    os.chown(runs, ada.uid, 21100)
    runs.chmod(0o2775)
    usual = runs / f".environments-{ada.uid}"
    ada.write(usual / "x.tar", "attacked")
    # A mark may come along, but nobody knew its number.
    ada.write(usual / MARK, "4711\n")
    ada.own(usual).chmod(0o700)
    code = (
        "import os; from pathlib import Path; from slurmft.core.trusted import NotOwnError\n"
        "from slurmft.plugins.stage_env.unpack import ARCHIVE\n"
        f"usual = Path({str(usual)!r})\n"
        "first = ARCHIVE.place(usual)\n"
        "print(first != usual, os.listdir(first) == ['.slurmft-folder'])\n"
        "print(ARCHIVE.place(usual) == first)\n"
        "with ARCHIVE.private(first) as private: ARCHIVE.check_place(first, private)\n"
        "try:\n"
        "    with ARCHIVE.private(usual) as private: ARCHIVE.check_place(usual, private)\n"
        "except NotOwnError as error: print(error)\n"
    )
    *facts, refusal, _ = ada.python(code).splitlines()
    assert facts == ["True True", "True"]
    assert "slurmft has not made this folder" in refusal
    # Nor an empty one of theirs, in the place of the one that is being made.
    eve.write(runs / "theirs" / "x", "").unlink()
    (runs / "theirs").chmod(0o777)
    code = (
        "from pathlib import Path; from slurmft.core import trusted\n"
        "from slurmft.plugins.stage_env.unpack import ARCHIVE\n"
        "make_folder = trusted.make_folder\n"
        "def swap(path, share):\n"
        "    make_folder(path, share); theirs = path.with_name('theirs')\n"
        "    if theirs.exists(): path.rename(path.with_name('away')); theirs.rename(path)\n"
        "trusted.make_folder = swap\n"
        f"print(ARCHIVE.place(Path({str(runs / 'again')!r})).stat().st_uid)\n"
    )
    assert ada.python(code) == f"{ada.uid}\n"


@attack(
    ANYBODY,
    "puts an archive, a link, a FIFO or another name of a file of yours on a node's disk, where "
    "`--stage-env` expects its archive; or a FIFO as the lock of a folder that looks left over",
    "not unpacked: the run uses the shared environment",
)
def archive_on_a_node(ada: User, eve: User) -> None:
    disk = ada.home / "disk of a node"
    disk.mkdir()
    disk.chmod(0o1777)
    tree = ada.write(ada.home / "packed" / "bin" / "python", "").parents[1]
    subprocess.run(
        ["tar", "-C", str(tree), "-cf", str(ada.home / "own.tar"), "."], check=True
    )
    ada.own(ada.home)
    good = ada.home / "own.tar"
    names = [
        f"slurmft-env-{ada.uid}-{kind}.tar"
        for kind in ("theirs", "link", "fifo", "linked", "other")
    ]
    theirs, link, fifo, linked, other = (disk / name for name in names)
    theirs.write_bytes(good.read_bytes())
    os.chown(theirs, eve.uid, eve.uid)
    link.symlink_to(good)
    os.mkfifo(fifo)
    os.chown(fifo, ada.uid, ada.uid)
    os.link(good, linked)
    other.write_bytes(good.read_bytes()[:-512] + bytes([1]) * 512)
    os.chown(other, ada.uid, ada.uid)
    left = disk / f"slurmft-env-{ada.uid}-left"
    left.mkdir()
    os.mkfifo(left / ".slurmft-lock")
    eve.own(left).chmod(0o755)
    sha256 = fingerprint(good)["sha256"]
    code = f"""
from slurmft.plugins.stage_env import unpack
for name in {names!r}:
    sent = {{f"{disk}/{{name}}": unpack.Sent("/nowhere", {sha256!r})}}
    with unpack.environment(sent, {{}}, lambda: False) as (python, variables):
        print(python, variables)
"""
    done = ada.run(sys.executable, "-c", code, timeout_s=60)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [f"{sys.executable} {{}}"] * 5
    reasons = done.err.splitlines()
    words = (
        "belongs to eve",
        "is a link",
        "is not a regular file",
        "has 2 names",
        "another sha256",
    )
    for reason, word in zip(reasons, words, strict=True):
        assert word in reason


@attack(
    GROUP,
    "can rename in the folder of `--stage-dir`, or in that of a link to it, and gives things of "
    "yours the names of staged environments",
    "nothing is unpacked there, and nothing removed: the run uses the shared environment",
)
def stage_folder_of_a_group(ada: User, eve: User) -> None:
    disk = ada.home / "stage"
    for name in ("a.old", "b", "c.tar"):
        ada.write(disk / f"slurmft-env-{ada.uid}-{name}" / "thesis.tex", "")
        ada.write(disk / f"slurmft-env-{ada.uid}-{name}" / ".slurmft-lock", "")
    os.chown(disk, ada.uid, 21100)
    disk.chmod(0o2775)
    archive = f"{disk}/slurmft-env-{ada.uid}-c.tar"
    (disk / "link").symlink_to(
        ada.own(ada.write(ada.home / "own-disk" / "x", "").parent)
    )
    os.chown(disk / "link", ada.uid, ada.uid, follow_symlinks=False)
    code = (
        "from pathlib import Path; from slurmft.plugins.stage_env import pack, unpack\n"
        f"sent = {{{archive!r}: unpack.Sent('/nowhere', '')}}\n"
        "with unpack.environment(sent, {}, lambda: False) as (python, variables):\n"
        "    print(variables)\n"
        f"print(unpack.leftovers(Path({str(disk)!r})))\n"
        f"pack.main(['remove', {json.dumps([archive])!r}])\n"
        f"for folder in ({str(disk)!r}, {str(disk / 'link')!r}):\n"
        "    try: pack.check_folder(folder, 0)\n"
        "    except unpack.StageError as error: print(error)\n"
    )
    first, left, *refusals = ada.python(code).splitlines()
    assert (first, left, len(refusals)) == ("{}", "[]", 2)
    for refusal in refusals:
        assert f"the group 21100 can rename what is in '{disk}'" in refusal
    assert len(list(disk.glob("*/thesis.tex"))) == 3


@attack(
    ANYBODY,
    "puts links of theirs, of whatever names, into your TMPDIR or the folder of `--stage-dir`, "
    "where all may make files",
    "used all the same: the names there are random",
)
def links_where_temporary_folders_are_made(ada: User, eve: User) -> None:
    disk = ada.home / "disk of all"
    disk.mkdir()
    disk.chmod(0o1777)
    os.chown(disk, 0, 0)
    for name in ("any", "x", "slurmft", f"slurmft-env-{ada.uid}"):
        link(eve, disk / name, eve.home)
    code = (
        "from pathlib import Path; from slurmft.core import trusted\n"
        "from slurmft.plugins.stage_env import pack\n"
        "print(trusted.temporary_place())\n"
        f"pack.check_disk(Path({str(disk)!r}))\n"
    )
    assert ada.python(code, TMPDIR=str(disk)) == f"{disk}\n"


@attack(
    ANYBODY,
    "has a file system of their own (FUSE), where the site lets them show it to others: it shows a "
    "run or a study as yours or root's",
    "all in it counts as theirs: refused; nothing of it runs, and no run of yours is made there",
)
def file_system_of_theirs(ada: User, eve: User) -> None:
    reason = lockfs.missing()
    if reason:
        pytest.skip(reason)
    with lockfs.TwoNodes(eve.home / "shown", user=eve.uid) as shown:
        top = shown.nodes[0]
        # As her file system would show it.
        run = write_run(top / "run-1", setup=(f"touch {ada.home}/attacked",))
        run.submitit.mkdir()
        launcher.note_job(run, "local", "4711", os.uname().nodename)
        for path in (top, *top.rglob("*")):
            path.chmod(0o755)
        ada.own(top)
        assert run.path.stat().st_uid == ada.uid
        done = ada.slurmft("resume", str(run.path), "--cluster", "local")
        assert_refused(
            done, f"'{top}': eve (uid {eve.uid}) has mounted this file system"
        )
        code = (
            "from pathlib import Path; from slurmft.core import trusted\n"
            f"top = Path({str(top)!r})\n"
            "print(trusted.is_own(top), trusted.other_owner(top / 'run-1'))\n"
            "print(trusted.is_open_to_renames(top), trusted.renaming_in(top).who)\n"
        )
        facts = ada.python(code).splitlines()
        assert facts == [f"False eve (uid {eve.uid})", "True everybody"]
        submit = ("submit", "--task", "synthetic", "--cluster", "local")
        done = ada.slurmft(*submit, "--runs-dir", str(top / "runs"))
        assert done.code != 0
        assert f"eve (uid {eve.uid}) has mounted this file system" in done.err
    assert not (ada.home / "attacked").exists()


@pytest.mark.parametrize("each", ATTACKS, ids=lambda each: each.carry_out.__name__)
def test_attack(users: tuple[User, User], each: Attack) -> None:
    each.carry_out(*users)
    # The next one may use the same names.
    for user in users:
        shutil.rmtree(user.home / "runs", ignore_errors=True)


def test_page_has_the_table() -> None:
    assert table() in (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")


def table() -> str:
    rows = ["| who | what they do | what comes of it |", "|---|---|---|"]
    rows += [f"| {each.who} | {each.what} | {each.result} |" for each in ATTACKS]
    return "\n".join(rows)


if __name__ == "__main__":
    with two_users() as both:
        for line in ATTACKS:
            line.carry_out(*both)
    print(table())
