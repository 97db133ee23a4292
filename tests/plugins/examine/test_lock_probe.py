"""The probe: which lock holds between nodes; what runs do with it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft import locks
from slurmft.core import filesystem
from slurmft.core.filesystem import FileSystem
from slurmft.plugins.examine import lock_probe
from slurmft.plugins.examine.agents import AgentError, Agents
from slurmft.plugins.examine.lock_operations import LockOperations
from slurmft.plugins.examine.lock_probe import Ask, Finding, ProbeError
from slurmft.plugins.examine.site import agent_command
from tests.conftest import HOSTILE
from tests.support import PATIENCE_S
from tests.support.lockfs import TwoNodes

pytestmark = pytest.mark.processes

GOOD = Finding(
    on_node=True, between_nodes=True, on_unlock=True, on_exit=True, on_kill=True
)
LOCAL = Finding(
    on_node=True, between_nodes=False, on_unlock=True, on_exit=True, on_kill=True
)
LEAVES_BEHIND = Finding(
    on_node=True, between_nodes=True, on_unlock=True, on_exit=True, on_kill=False
)
NFS = FileSystem(type="nfs4", source="server:/x", mount="/x")


@contextlib.contextmanager
def agents(*folders: Path) -> Iterator[Ask]:
    """An agent on each of the folders, as if they were on as many nodes."""
    names = [f"n{number}" for number in range(len(folders))]
    with Agents(dict.fromkeys(names, agent_command())) as started:
        asks = [
            lock_probe.ask_agents(started, [n], f, PATIENCE_S)
            for n, f in zip(names, folders, strict=True)
        ]
        yield lambda node, *what: asks[node](0, *what)


def test_between_two_nodes(two_nodes: tuple[Path, Path]) -> None:
    with agents(*two_nodes) as ask:
        findings = lock_probe.probe(ask, 2, NFS)
        quick = lock_probe.probe(ask, 2, NFS, thorough=False)
    assert findings
    assert quick
    good = [name for name, finding in findings.items() if finding.good]
    assert findings["flock"].between_nodes is False
    assert findings["flock"].on_node
    assert good[:2] == ["lockf", "ofd"]
    assert findings["soft"].excludes
    assert list(quick) == ["lockf"]
    assert lock_probe.choose(findings, NFS) == lock_probe.choose(quick, NFS) == "lockf"
    assert not list(two_nodes[0].glob(".slurmft-*"))


@pytest.mark.usefixtures("two_nodes")  # it says what is missing
def test_locks_that_outlive_their_process_are_found(tmp_path: Path) -> None:
    with TwoNodes(tmp_path, leak_ofd=True) as two, agents(*two.nodes) as ask:
        findings = lock_probe.probe(ask, 2, NFS)
    assert findings
    assert findings["ofd"].excludes
    assert findings["ofd"].on_kill is False
    assert lock_probe.choose(findings, NFS) == "lockf"


def test_folders_that_only_have_the_same_name(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / HOSTILE]
    for folder in folders:
        folder.mkdir()
    with agents(*folders) as ask:
        assert lock_probe.probe(ask, 2, NFS) is None


@pytest.mark.parametrize(
    ("findings", "choice"),
    [
        # as processes use that know of no measurement
        ({"flock": GOOD, "lockf": GOOD}, "lockf"),
        ({"flock": GOOD, "lockf": LOCAL}, "flock"),
        ({"flock": LOCAL, "lockf": LEAVES_BEHIND, "ofd": GOOD}, "ofd"),
        ({"flock": Finding(error="No locks available"), "soft": LEAVES_BEHIND}, "soft"),
        # one node cannot know
        ({"flock": Finding(on_node=True, on_unlock=True)}, "lockf"),
    ],
)
def test_choice(findings: dict[str, Finding], choice: str) -> None:
    assert lock_probe.choose(findings, NFS) == choice


def test_a_lock_that_others_see_released_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft lock on GlusterFS: the other node remembers for a second that its file was there."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    answers: dict[str, Iterator[str]] = {}

    def ask(node: int, operation: str, primitive: str = "-", name: str = "-") -> str:
        if operation == "try":
            busy = 1 if name.endswith(primitive) else 0  # first while it is held
            replies = answers.setdefault(
                name, iter(["busy"] * (busy + 15) + ["got"] * 99)
            )
            return next(replies)
        # beside the one that holds it
        if operation == "die" and name.endswith(primitive):
            return "busy"
        return {"see": "yes"}.get(operation, "got")

    findings = lock_probe.probe(ask, 2, NFS)
    assert findings
    assert all(finding.good for finding in findings.values())


def test_nothing_holds() -> None:
    with pytest.raises(
        ProbeError, match="no kind of file lock holds on nfs4 at /x"
    ) as error:
        lock_probe.choose({"flock": LOCAL, "soft": LOCAL}, NFS)
    assert "HF_HOME" in str(error.value.hint)


def test_two_probes_of_one_folder_do_not_disturb_each_other(
    two_nodes: tuple[Path, Path],
) -> None:
    """Array tasks start together."""
    with agents(*two_nodes) as one, agents(*two_nodes) as other:
        turns = iter(range(10**6))

        def ask(agent: int, *what: str) -> str:
            # the other one begins, measures and clears up meanwhile
            if next(turns) % 3 == 2:
                assert lock_probe.probe(other, 2, NFS, thorough=False)
            return one(agent, *what)

        findings = lock_probe.probe(ask, 2, NFS)
    assert findings
    assert [name for name in findings if findings[name].good][:2] == ["lockf", "ofd"]
    assert not list(two_nodes[0].glob(".slurmft-*"))


def test_folder_that_takes_no_lock() -> None:
    findings = {
        name: Finding(error="No such file or directory") for name in ("flock", "lockf")
    }
    with pytest.raises(
        ProbeError, match="holds on nfs4 at /x: No such file or directory"
    ):
        lock_probe.choose(findings, NFS)


def test_record_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = filesystem.of(tmp_path)
    lock_probe.record(here, {"flock": LOCAL, "ofd": GOOD}, nodes=3)
    assert locks.primitive_for(tmp_path) == "ofd"
    findings = locks.recorded(here)
    assert findings is not None
    assert (findings["nodes"], findings["findings"]["ofd"]["between_nodes"]) == (
        3,
        True,
    )


def test_two_users_on_one_file_system_use_one_primitive(
    two_nodes: tuple[Path, Path],
) -> None:
    """One has measured, the other not."""
    with agents(two_nodes[0], two_nodes[0]) as ask:  # here flock holds as well
        findings = lock_probe.probe(ask, 2, filesystem.of(two_nodes[0]))
    assert findings
    assert findings["flock"].good
    assert lock_probe.choose(findings, NFS) == locks.default(NFS)


def test_error_of_an_agent_that_does_not_answer(tmp_path: Path) -> None:
    hangs = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with Agents({"n1": hangs}) as started:
        ask = lock_probe.ask_agents(started, ["n1"], tmp_path, 0.3)
        with pytest.raises(
            AgentError, match=r"n1: no answer in 0 s \(hold lockf\)"
        ) as error:
            ask(0, "hold", "lockf", "x")
    assert "lock service" in str(error.value.hint)


def test_lock_files_go_from_a_folder_where_others_can_rename(tmp_path: Path) -> None:
    """A soft lock holds the record of its process."""
    tmp_path.chmod(0o777)
    operations = LockOperations()
    name = operations.lock(str(tmp_path), "token", "soft", "")
    for ending in ("", ".soft"):
        (tmp_path / f".slurmft-lock-{name}{ending}").write_text("4711 n1")
    (tmp_path / ".slurmft-lock-other").write_text("4712 n2")
    assert operations.lock(str(tmp_path), "clear", "soft", name) == "yes"
    assert [path.name for path in tmp_path.iterdir()] == [".slurmft-lock-other"]
