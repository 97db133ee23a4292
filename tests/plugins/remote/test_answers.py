"""What a cluster answers, whoever has it: bounded, refused in words, and in no other file of the
user's than those that were asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.conftest import Done
from tests.support import CHECKOUT
from tests.support.damage import damaged

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync"),
]

_SSH = """#!/bin/bash
# ssh to a cluster that answers every command of slurmft with what is in a file
while [ $# != 0 ]; do
  case $1 in -G) exit ;; -o) shift 2 ;; -*) shift ;; *) break ;; esac
done
shift
export HOME={home} && cd
case "$*" in
  *"-m slurmft "*) mkdir -p {home}/slurmft; {answer} ;;
  *) exec bash -c "$*" ;;
esac
"""

STATUS: dict[str, Any] = {
    "path": "/nowhere/emotion-1",
    "state": "finished",
    "history": [
        {"state": "running", "time": 1000.0},
        {"state": "finished", "time": 2000.0},
    ],
    "program": {"kind": "own", "settings": {"folder": "/x", "checkpoint_dir": "out"}},
    "owner": "ada",
    "is_own": True,
    "inode": 4711,
}


class Cluster:
    """A folder here, from which commands are typed, and a cluster with any answers."""

    def __init__(self, top: Path) -> None:
        self.folder = top / "here"
        self.home = top / "there"
        self.folder.mkdir()
        self.home.mkdir()
        self._ssh = top / "ssh"
        self._clusters = top / "clusters.toml"
        self._clusters.write_text(
            f'[lab]\nhost = "lab"\npython = "python"\nssh = {json.dumps(str(self._ssh))}\n'
        )

    def answers(self, command: str) -> None:
        """Names the command of a shell that answers."""
        text = _SSH.replace("{home}", str(self.home)).replace("{answer}", command)
        self._ssh.write_text(text)
        self._ssh.chmod(0o755)

    def answers_with(self, content: bytes) -> None:
        file = self.home / "answer"
        file.write_bytes(content)
        self.answers(f"cat {file}")

    def slurmft(self, *words: str) -> Done:
        # Of memory, the commands need a third of this.
        limited = ["bash", "-c", 'ulimit -d 700000; exec "$@"', "bash"]
        done = subprocess.run(
            [*limited, sys.executable, "-m", "slurmft", *words],
            cwd=self.folder,
            env=os.environ
            | {
                "SLURMFT_CLUSTERS": str(self._clusters),
                "PYTHONPATH": str(CHECKOUT),
                "XDG_STATE_HOME": str(self.home / "state"),
                "XDG_RUNTIME_DIR": str(self.home / "absent"),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=300,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def files(self) -> list[str]:
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*"))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def assert_refused(done: Done, words: str) -> None:
    assert done.code not in (0, 255), done.out
    assert "Traceback" not in done.err
    assert words in done.err, done.err


@pytest.mark.parametrize("stream", ["", " >&2"])
def test_without_end(cluster: Cluster, stream: str) -> None:
    """Its end is what an error would be in."""
    cluster.answers(f"head -c 3000000000 /dev/zero{stream}; exit 1")
    words = "error: the answer of lab is larger than 64.0 MiB"
    if stream:
        words = "error: "
    assert_refused(cluster.slurmft("pull", "last", "--on", "lab"), words)
    assert cluster.files() == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("", "is no JSON"),
        ("Welcome\n{}", "is no JSON; it begins with 'Welcome'"),
        ("\x1b]0;title\x07", r"it begins with '\x1b]0;title\x07'"),
        ("[" * 100_000, "is no JSON"),
        ("[" * 100 + "]" * 100, "is no JSON"),
        ('{"a": 1' + "0" * 10_000 + "}", "is no JSON"),
        ("[]", "the answer of lab is none of slurmft status: [] is no object"),
        ("null", "is none of slurmft status"),
        ("{}", "is none of slurmft status: history, path, program, state missing"),
        (json.dumps(STATUS | {"path": 7}), "path: 7 is no str"),
        (json.dumps(STATUS | {"is_own": "true"}), "is_own: 'true' is no bool"),
        (json.dumps(STATUS | {"inode": "1; touch attacked"}), "inode: "),
        (json.dumps(STATUS | {"path": "/"}), "has no name that a run could have"),
        (json.dumps(STATUS | {"path": "/x/.."}), "has no name that a run could have"),
        (json.dumps(STATUS | {"path": "/x/.ssh"}), "has no name that a run could have"),
        (json.dumps(STATUS | {"path": "/x/a\nb"}), "has no name that a run could have"),
        (json.dumps(STATUS | {"path": "/x/a\0b"}), "has no name that a run could have"),
        (json.dumps(STATUS | {"path": "/x/" + "a" * 300}), "File name too long"),
    ],
)
def test_of_another_form(cluster: Cluster, answer: str, words: str) -> None:
    cluster.answers_with(answer.encode())
    assert_refused(cluster.slurmft("pull", "last", "--on", "lab"), words)
    assert cluster.files() in ([], ["runs"])


def test_of_any_form(cluster: Cluster) -> None:
    """Nothing comes of it, as there is no such run."""
    content = json.dumps(STATUS).encode()
    for seed in range(12):
        cluster.answers_with(damaged("status.json", content, Random(seed)))
        done = cluster.slurmft("pull", "last", "--on", "lab")
        assert "Traceback" not in done.err, (seed, done.err)
        assert done.code, (seed, done.out)
        for file in cluster.files():
            assert Path(file).name not in ("config.json", "result.json"), (seed, file)


def test_list_of_several(cluster: Cluster) -> None:
    """What one of them answers hides no other, and is JSON."""
    text = cluster._clusters.read_text()
    cluster._clusters.write_text(text + text.replace("[lab]", "[other]"))
    cluster.answers_with(b'{"loss": 1e999, "name": "\\u001b[2J"}')
    done = cluster.slurmft("list", "--json", "--on", "lab,other")
    assert done.code == 0, done.err
    answer = {"loss": None, "name": "\x1b[2J"}
    assert json.loads(done.out) == {"lab": answer, "other": answer}
    assert "\x1b" not in done.out
    cluster.answers("printf '\\033]0;x\\007'; echo 'a\\033[2J' >&2; exit 3")
    done = cluster.slurmft("list", "--on", "lab,other")
    assert done.code == 3
    assert "\x1b" not in done.out + done.err


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_of_outputs_comes_what_was_asked_for(cluster: Cluster, kind: str) -> None:
    """Other names in the folder there would be other files of the user's here."""
    (cluster.folder / ".bashrc").write_text("mine")
    write = 'p=$(echo "$*" | grep -o "slurmft/outputs/[0-9a-f]*" | head -1); mkdir -p "$HOME/$p"'
    write += ' && cd "$HOME/$p" && echo attacked >.bashrc'
    write += " && mkdir .git && echo attacked >.git/config && ln -s /etc linked"
    if kind == "file":
        cluster.answers(f"{write} && echo table >report")
    else:
        cluster.answers(f"{write} && mkdir report && echo table >report/report.html")
    done = cluster.slurmft("report", "last", "--on", "lab", "--output", "report")
    assert done.code == 0, done.err
    assert (cluster.folder / ".bashrc").read_text() == "mine"
    expected = [".bashrc", "report"]
    if kind == "folder":
        expected.append("report/report.html")
    assert cluster.files() == expected
