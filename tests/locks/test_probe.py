"""The probe: which lock holds between nodes; `slurmft doctor locks`; what runs do with it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft import locks
from slurmft.core import filesystem
from slurmft.core.filesystem import FileSystem
from slurmft.locks import probe
from slurmft.locks.probe import Ask, Finding, ProbeError, Talk
from tests.conftest import HOSTILE, records, slurmft
from tests.support.cluster import Cluster
from tests.support.faults import BASE
from tests.support.lockfs import TwoNodes
from tests.train.test_trainer import emotion

GOOD = Finding(
    on_node=True, between_nodes=True, on_unlock=True, on_exit=True, on_kill=True, cost_us=9.0
)
LOCAL = Finding(
    on_node=True, between_nodes=False, on_unlock=True, on_exit=True, on_kill=True, cost_us=9.0
)
LEAVES_BEHIND = Finding(
    on_node=True, between_nodes=True, on_unlock=True, on_exit=True, on_kill=False, cost_us=9.0
)
NFS = FileSystem(type="nfs4", source="server:/x", mount="/x")


@contextlib.contextmanager
def agents(*folders: Path, timeout_s: float = 20) -> Iterator[Ask]:
    """An agent on each of the folders, as if they were on as many nodes."""
    with contextlib.ExitStack() as stack:
        talks = [
            stack.enter_context(Talk([*probe.agent_command(folder), str(number)], timeout_s))
            for number, folder in enumerate(folders)
        ]
        yield lambda agent, *what: talks[agent].ask(agent, *what)


def test_between_two_nodes(two_nodes: tuple[Path, Path]) -> None:
    with agents(*two_nodes) as ask:
        found = probe.probe(ask, 2, NFS)
        quick = probe.probe(ask, 2, NFS, thorough=False)
    assert found
    assert quick
    good = [name for name, finding in found.items() if finding.good]
    assert found["flock"].between_nodes is False
    assert found["flock"].on_node
    assert good[:2] == ["lockf", "ofd"]
    assert all(finding.cost_us for finding in found.values())
    assert found["soft"].excludes
    assert list(quick) == ["lockf"]
    assert probe.choose(found, NFS) == probe.choose(quick, NFS) == "lockf"
    assert not list(two_nodes[0].glob(".slurmft-*"))


@pytest.mark.usefixtures("two_nodes")  # it says what is missing
def test_locks_that_outlive_their_process_are_found(tmp_path: Path) -> None:
    with TwoNodes(tmp_path, leak_ofd=True) as two, agents(*two.nodes) as ask:
        found = probe.probe(ask, 2, NFS)
    assert found
    assert found["ofd"].excludes
    assert found["ofd"].on_kill is False
    assert probe.choose(found, NFS) == "lockf"


def test_folders_that_only_have_the_same_name(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / HOSTILE]
    for folder in folders:
        folder.mkdir()
    with agents(*folders) as ask:
        assert probe.probe(ask, 2, NFS) is None


@pytest.mark.parametrize(
    ("found", "choice"),
    [
        ({"flock": GOOD, "lockf": GOOD}, "lockf"),  # as processes use that know of no measurement
        ({"flock": GOOD, "lockf": LOCAL}, "flock"),
        ({"flock": LOCAL, "lockf": LEAVES_BEHIND, "ofd": GOOD}, "ofd"),
        ({"flock": Finding(error="No locks available"), "soft": LEAVES_BEHIND}, "soft"),
        ({"flock": Finding(on_node=True, on_unlock=True)}, "lockf"),  # one node cannot know
    ],
)
def test_choice(found: dict[str, Finding], choice: str) -> None:
    assert probe.choose(found, NFS) == choice


def test_nothing_holds() -> None:
    with pytest.raises(ProbeError, match="no kind of file lock holds on nfs4 at /x") as error:
        probe.choose({"flock": LOCAL, "soft": LOCAL}, NFS)
    assert "HF_HOME" in str(error.value.hint)


def test_two_probes_of_one_folder_do_not_disturb_each_other(two_nodes: tuple[Path, Path]) -> None:
    """Array tasks start together."""
    with agents(*two_nodes) as one, agents(*two_nodes) as other:
        turns = iter(range(10**6))

        def ask(agent: int, *what: str) -> str:
            if next(turns) % 3 == 2:  # the other one begins, measures and clears up meanwhile
                assert probe.probe(other, 2, NFS, thorough=False)
            return one(agent, *what)

        found = probe.probe(ask, 2, NFS)
    assert found
    assert [name for name in found if found[name].good][:2] == ["lockf", "ofd"]
    assert not list(two_nodes[0].glob(".slurmft-*"))


def test_what_others_print_is_no_answer(tmp_path: Path) -> None:
    """A prolog, a sitecustomize; and half a line is no line."""
    noise = 'echo "welcome to n1"; exec "$0" "$@"'
    with Talk(["bash", "-c", noise, *probe.agent_command(tmp_path)], timeout_s=20) as talk:
        assert json.loads(talk.ask(0, "place"))[1] == filesystem.of(tmp_path).type
    half = ["bash", "-c", "printf slurmft-; sleep 9"]
    with Talk(half, timeout_s=0.3) as talk, pytest.raises(ProbeError, match="no answer within"):
        talk.ask(0, "place")


def test_an_srun_that_waits_is_told_to_give_up(tmp_path: Path) -> None:
    told = tmp_path / "told"
    waits = f'trap "touch {told}; exit" TERM; while :; do sleep 0.05; done'
    with Talk(["bash", "-c", waits], timeout_s=0.3) as talk, pytest.raises(ProbeError):
        talk.ask(0, "place")
    assert told.exists()


def test_folder_that_takes_no_lock() -> None:
    found = {name: Finding(error="No such file or directory") for name in ("flock", "lockf")}
    with pytest.raises(ProbeError, match="holds on nfs4 at /x: No such file or directory"):
        probe.choose(found, NFS)


def test_record_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = filesystem.of(tmp_path)
    probe.record(here, {"flock": LOCAL, "ofd": GOOD}, nodes=3)
    assert locks.primitive_for(tmp_path) == "ofd"
    found = locks.recorded(here)
    assert found is not None
    assert (found["nodes"], found["findings"]["ofd"]["between_nodes"]) == (3, True)


def test_two_users_on_one_file_system_use_one_primitive(two_nodes: tuple[Path, Path]) -> None:
    """One has measured, the other not."""
    with agents(two_nodes[0], two_nodes[0]) as ask:  # here flock holds as well
        found = probe.probe(ask, 2, filesystem.of(two_nodes[0]))
    assert found
    assert found["flock"].good
    assert probe.choose(found, NFS) == locks.default(NFS)


def test_an_agent_that_hangs_or_ends_is_told(tmp_path: Path) -> None:
    hangs = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.read()"]
    with Talk(hangs, timeout_s=0.3) as talk, pytest.raises(ProbeError, match=r"no answer within"):
        talk.ask(0, "hold", "lockf")
    with Talk([sys.executable, "-c", ""], timeout_s=20) as talk:
        with pytest.raises(ProbeError, match="the probe ended before its time"):
            talk.ask(0, "hold", "lockf")
        talk.process.wait()


# --- slurmft doctor locks -------------------------------------------------------------------------


def test_doctor_on_one_machine(tmp_path: Path) -> None:
    (tmp_path / HOSTILE).mkdir()
    alone = {"PATH": f"{Path(sys.executable).parent}:/nowhere", "XDG_CACHE_HOME": str(tmp_path)}
    done = slurmft("doctor", "locks", str(tmp_path / HOSTILE), env=alone)
    assert done.code == 0, done.err
    assert "one node cannot know what holds between nodes" in done.out
    assert not (tmp_path / "slurmft").exists()  # nothing recorded
    found = json.loads(slurmft("doctor", "locks", "--json", str(tmp_path), env=alone).out)
    assert found["choice"] == locks.default(filesystem.of(tmp_path))
    assert set(found["findings"]) == {"flock", "lockf", "ofd", "soft"}
    assert slurmft("doctor", "locks", str(tmp_path), "--nodes", "2", env=alone).code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["locks", "/nowhere"], "no such folder: '/nowhere'"),
        (["lock"], "did you mean locks?"),
        (["locks"], "the following arguments are required: DIR"),
        (["locks", "/tmp", "--node", "2"], "did you mean --nodes?"),
        (["locks", "/tmp", "--nodes", "-1"], "--nodes -1"),
    ],
)
def test_doctor_bad_input(arguments: list[str], words: str) -> None:
    done = slurmft("doctor", *arguments)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.slurm
def test_doctor_on_the_nodes_of_an_allocation(
    idle_cluster: Cluster, shared_folder: Path, tmp_path: Path
) -> None:
    env = idle_cluster.env | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = slurmft("doctor", "locks", str(shared_folder), "--nodes", "2", env=env)
    assert done.code == 0, done.err
    assert "seen from n1, n2" in done.out
    lines = {line.split()[0]: line for line in done.out.splitlines() if line.strip()}
    assert "DOES NOT EXCLUDE" in lines["flock"]
    assert "DOES NOT EXCLUDE" not in lines["lockf"]
    assert "choice: lockf" in done.out
    record = json.loads(next((tmp_path / "cache").rglob("*.json")).read_text())
    assert (record["primitive"], record["nodes"]) == ("lockf", 2)
    refused = slurmft(
        "doctor", "locks", str(shared_folder), "--nodes", "2", "--partition", "x", env=env
    )
    assert refused.code != 0
    assert "invalid partition" in refused.err


@pytest.mark.slurm
def test_doctor_where_each_node_has_a_folder_of_its_own(
    idle_cluster: Cluster, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("one", HOSTILE, "common")]
    for folder in folders:
        folder.mkdir()
    idle_cluster.show(folders[:2], folders[2])
    arguments = ("doctor", "locks", str(folders[2]), "--nodes", "2", "--time", "2")
    done = slurmft(*arguments, env=idle_cluster.env | {"XDG_CACHE_HOME": str(tmp_path)})
    idle_cluster.show([], folders[2])
    assert done.code == 0, done.err
    assert "not one folder: n1, n2 each have their own there" in done.out
    assert not (tmp_path / "slurmft").exists()


@pytest.mark.slurm
def test_metrics_by_files_where_flock_is_local(
    idle_cluster: Cluster, shared_folder: Path, tiny_data: Path, tiny_model: Path
) -> None:
    """The run directory itself is there; with plain flock evaluate sees no locks of other nodes."""
    source = emotion(tiny_data, tiny_model)
    flags = (*BASE, "--epochs", "1", "--metric-gather", "files", "--runs-dir", str(shared_folder))
    done = slurmft("submit", "--follow", *flags, *source, env=idle_cluster.env)
    assert done.code == 0, done.err + done.out
    by_memory = slurmft("submit", "--follow", *BASE, "--epochs", "1", "--runs-dir",
                        str(tiny_data.parent), *source, env=idle_cluster.env)  # fmt: skip
    assert done.result["metrics"] == by_memory.result["metrics"]
    assert records(done.run, "epoch")
    assert not (done.run.path / "metrics").exists()
