"""The examination of nodes whose agents are real, on this machine."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from slurmft.core.config import JobConfig
from slurmft.node.rendezvous import LOCAL_NODE
from slurmft.plugins.examine import examination as doctor_examination
from slurmft.plugins.examine.agents import Agents
from slurmft.plugins.examine.checks import Report
from slurmft.plugins.examine.examination import Examination
from slurmft.plugins.examine.site import Site, agent_command
from tests.plugins.examine.test_rules import wrong
from tests.support import PATIENCE_S

pytestmark = pytest.mark.processes

SKEWED = """\
import time
now = time.time
time.time = lambda: now() + 90
from slurmft.plugins.examine import agents
from slurmft.plugins.examine.agent import Agent
agents.serve(Agent())
"""
CLOSED = """\
from slurmft.plugins.examine import agents
from slurmft.plugins.examine.agent import Agent
listen = Agent.listen
Agent.listen = staticmethod(lambda **k: listen(**k) | {"rendezvous": 9})
agents.serve(Agent())
"""
BROKEN_GPU = """\
from slurmft.plugins.examine import agents
from slurmft.plugins.examine import gpu_errors, inspection
from slurmft.plugins.examine.agent import Agent
log = "[1.5] NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus."
inspection._gpu_errors = lambda: tuple(gpu_errors.parse_xids(log, now_s=60))
agents.serve(Agent())
"""
DEAF = "import sys; sys.stdin.read()"
DEAD = """\
import sys
print('slurmft-agent {"number": 1, "answ', end="")  # killed while it spoke
sys.exit("srun: error: Node failure on n7")
"""


def test_sick_nodes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once: a broken GPU, a skewed clock, a closed port, a name that does not resolve, one
    that does not answer, one that is dead."""
    monkeypatch.setattr(doctor_examination, "_START_S", 12.0)
    programs = {"n2": BROKEN_GPU, "n3": SKEWED, "n4": CLOSED, "n6": DEAF, "n7": DEAD}
    names = [f"n{i}" for i in range(1, 8)]
    commands = {
        name: ["env", f"{LOCAL_NODE}={i}"]
        + (
            [sys.executable, "-c", programs[name]]
            if name in programs
            else agent_command()
        )
        for i, name in enumerate(names)
    }
    hosts = {name: f"127.0.0.{i + 1}" for i, name in enumerate(names)} | {
        "n5": "n5.invalid"
    }
    site = Site(hosts=hosts, commands=commands, env={}, job_id="7", simulated=True)
    folders = {"runs": tmp_path, "cache": tmp_path / "cache"}
    report = Report()
    with Agents(site.commands) as agents:
        deadline = time.monotonic() + PATIENCE_S
        Examination(site, agents, JobConfig(nodes=7), folders, deadline, report).run(
            quick=True
        )
    lines = "\n".join(wrong(report.checks))
    assert "failure: n2: GPU at 0000:17:00: Xid 79, GPU has fallen off the bus" in lines
    assert "failure: n6: no answer in 12 s" in lines
    assert "failure: n7: its agent ended: Node failure on n7" in lines
    assert "n5: n1, n2, n3, n4 cannot resolve it: " in lines
    assert (
        "n4: n1, n2, n3, n5 cannot reach it on a rendezvous port: Connection refused"
        in lines
    )
    assert re.search(
        r"failure: n3: its clock is (89|90)\.\d s ahead of the others", lines
    ), lines
    assert report.measured.usable == ["n1", "n2", "n3"]
    assert not list(tmp_path.iterdir())  # nothing is left in the folders
    assert all(child.returncode is not None for child in agents._processes.values())


def test_a_node_describes_itself() -> None:
    with Agents({"n1": agent_command()}) as agents:
        job = JobConfig(nodes=1, nproc_per_node=1)
        (lines,) = agents.ask("describe", {"n1": {"job": job}}, PATIENCE_S).values()
    rows = dict(line.split("  ", 1) for line in lines if "  " in line[:12])
    assert rows["host"].strip() == os.uname().nodename
    assert any(line.startswith("OMP_NUM_THREADS=") for line in lines)
