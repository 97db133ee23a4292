"""Which library sums gradients on CPUs: gloo and a stand-in for oneCCL, measured on two nodes."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.decode import read
from slurmft.core.program import Program
from slurmft.core.run_files import ATTEMPT
from slurmft.core.run_records import Compared, Warned
from slurmft.node import collectives
from slurmft.node.hardware import host_name
from slurmft.node.rendezvous import (
    RESERVED,
    Rendezvous,
    answer_checks,
    check_reachable,
    free_ports,
    reserved_descriptors,
)
from slurmft.node.supervisor import Supervisor
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from slurmft.train.program import weights_of
from tests.support import PATIENCE_S
from tests.support.ccl import stand_in, torch_version

pytestmark = pytest.mark.processes

HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A training on two nodes, where the stand-in is installed."""
    monkeypatch.setenv(ATTEMPT, "1")
    monkeypatch.setenv(RESERVED, "")  # as each head sets it
    folder = stand_in(tmp_path / "lib", torch_version())["PYTHONPATH"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, *sys.path]))
    monkeypatch.syspath_prepend(folder)
    program = Program(kind="train", name="test", module="tests.none")
    job = JobConfig(nodes=2, runs_dir=str(tmp_path), profile="cpu", nproc_per_node=1)
    return RunDir.create(RunConfig(program=program, job=job))


def settle(run: RunDir, hosts: tuple[str, ...] = HOSTS) -> list[str]:
    """The backend on each node."""
    port, check_port = free_ports()
    config = run.load_config()
    supervisors = [Supervisor(run), Supervisor(run)]
    supervisors[0].peers = answer_checks(check_port, "7.0", "s", ["127.0.0.1"])
    supervisors[1].peers = check_reachable(
        "n2", "127.0.0.1", check_port, "7.0", "s", PATIENCE_S
    )[1]
    backends = ["", ""]

    def settle_node(node: int) -> None:
        rendezvous = Rendezvous(
            hosts=hosts,
            node_rank=node,
            port=port,
            check_port=check_port,
            id="7.0",
            interface="lo",
        )
        if node == 0:
            os.environ.update(rendezvous.reserve_port(os.environ))
        settled = collectives.settle(supervisors[node], config, rendezvous)
        backends[node] = settled.job.backend

    nodes = [threading.Thread(target=settle_node, args=(node,)) for node in (0, 1)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    (descriptor,) = reserved_descriptors(os.environ)
    os.close(descriptor)
    return backends


def test_faster_one_is_kept_while_the_nodes_stay(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CCL_STAND_IN", "fast")
    assert settle(run) == ["ccl", "ccl"]
    decision = read(run.collectives, collectives.Decision)
    assert decision is not None
    assert decision.ccl_s is not None
    assert decision.gloo_s is not None
    assert decision.ccl_s < decision.gloo_s
    (line,) = RecordReader(run.records).read(Compared)
    assert line.text.startswith("ccl: a gradient of ")
    for seconds in (decision.ccl_s, decision.gloo_s):
        assert f"{seconds:.3g} s by " in line.text
    measured = []

    def measure(self: object, processes: int, hosts: list[str]) -> collectives.Decision:
        measured.append(hosts)
        return collectives.Decision(
            backend="gloo", hosts=hosts, numbers=1, dtype="float32", problem="none"
        )

    # The other node waits for the word of the head.
    monkeypatch.setattr(collectives._Settlement, "_measure", measure)
    monkeypatch.setattr(
        collectives._Settlement, "_start", lambda *a: collectives._Probes("")
    )
    assert settle(run) == ["ccl", "ccl"]
    assert not measured
    others = ("127.0.0.1", "127.0.0.3")
    assert settle(run, others) == ["auto", "auto"]
    assert measured == [list(others)]


def _rare(manner: str, problem: str) -> Any:
    return pytest.param(manner, problem, marks=pytest.mark.extra("mpi"))


@pytest.mark.parametrize(
    ("manner", "problem"),
    [
        ("dies", "Fatal error in internal_Comm_create_group"),
        _rare("wrong", "RuntimeError: the sum over 2 ranks is 3.0"),
        _rare("hangs", "no answer within 2 s"),
        _rare("slow", ""),
    ],
)
def test_gloo_is_left(
    manner: str, problem: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CCL_STAND_IN", manner)
    if manner == "hangs":
        monkeypatch.setattr(collectives, "_CCL_S", 2)
    began = time.monotonic()
    assert settle(run) == ["auto", "auto"]
    # Nobody waits for the others until a time-out.
    assert time.monotonic() - began < PATIENCE_S
    warnings = [each.text for each in RecordReader(run.records).read(Warned)]
    if problem:
        text = f"collectives use gloo; ccl fails on {host_name()}: {problem}"
        assert warnings == [text]
    else:
        assert not warnings
    decision = read(run.collectives, collectives.Decision)
    assert decision is not None
    assert decision.backend == "gloo"


def test_gradient_is_that_of_the_model(tiny_model: Path) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_model)
    count = sum(weight.numel() for weight in model.parameters())
    assert weights_of(str(tiny_model)) == pytest.approx(count, rel=0.2)
    adapters = weights_of(str(tiny_model), lora=1)
    assert adapters is not None
    assert adapters < count / 4
    assert weights_of("/none/such") is None


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 9, b"\5" + bytes(7) + b"[[[[[", b"\2" + bytes(7) + b"[]",
     b"\x08" + bytes(7) + b'{"a":{}}', b"\x14" + bytes(7) + b'{"a":{"shape":"ab"}}'],
)  # fmt: skip
def test_weights_of_a_damaged_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weights_of(str(tmp_path)) is None


def test_cause_goes_before_what_it_has_done_to_others() -> None:
    problems = [
        "on n1: killed by SIGABRT",
        "on n2: RuntimeError: Connection closed by peer",
        "on n3: ImportError: libccl.so.1: cannot open shared object file",
    ]
    assert sorted(problems, key=collectives._is_effect)[0] == problems[2]
