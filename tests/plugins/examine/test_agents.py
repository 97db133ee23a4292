"""Agents: answers, and what becomes of agents that hang, end or print something else."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from slurmft.plugins.examine.agents import AgentError, Agents
from tests.support import PATIENCE_S, until

pytestmark = pytest.mark.processes

AGENT = """\
import time
from slurmft.plugins.examine import agents

class Arithmetic:
    def double(self, value, after_s=0.0):
        time.sleep(after_s)
        return 2 * value

    def fail(self):
        raise OSError(28, "No space left on device")

agents.serve(Arithmetic())
"""
COMMAND = [sys.executable, "-c", AGENT]


def ask(
    agents: Agents, operation: str, timeout_s: float = PATIENCE_S, **arguments: Any
) -> Any:
    return agents.ask(operation, {"n1": arguments}, timeout_s)["n1"]


def test_answers_and_errors() -> None:
    with Agents({"n1": COMMAND, "n2": COMMAND}) as agents:
        assert agents.ask(
            "double", {"n1": {"value": 1}, "n2": {"value": 2}}, PATIENCE_S
        ) == {
            "n1": 2,
            "n2": 4,
        }
        failed = ask(agents, "fail")
        assert isinstance(failed, AgentError)
        assert failed.message == "No space left on device"


def test_an_operation_that_hangs_blocks_nothing() -> None:
    with Agents({"n1": COMMAND}) as agents:
        assert ask(agents, "double", value=1) == 2
        late = ask(agents, "double", timeout_s=0.2, value=5, after_s=0.5)
        assert isinstance(late, AgentError)
        assert late.message.startswith("no answer in")
        time.sleep(0.5)
        assert ask(agents, "double", value=3) == 6  # not the late answer
        ask(agents, "double", timeout_s=0, value=1, after_s=1000)
        began = time.monotonic()
    assert time.monotonic() - began < 100


def test_what_others_print_is_no_answer() -> None:
    """A prolog, a sitecustomize; and half a line is no line."""
    noise = ["bash", "-c", 'echo "welcome to n1"; exec "$0" "$@"', *COMMAND]
    with Agents({"n1": noise}) as agents:
        assert ask(agents, "double", value=1) == 2
    half = ["bash", "-c", "printf slurmft-; sleep 9"]
    with Agents({"n1": half}) as agents:
        assert "no answer in" in ask(agents, "double", timeout_s=0.3, value=1).message


def test_an_agent_that_ended() -> None:
    ended = textwrap.dedent("""\
        import sys
        print('slurmft-agent {"number": 1, "answ', end="")  # killed while it printed
        sys.exit("srun: error: Node failure on n7")
        """)
    with Agents({"n1": [sys.executable, "-c", ended]}) as agents:
        for _ in range(2):
            error = ask(agents, "double", value=1)
            assert error.message == "its agent ended: Node failure on n7"


def test_an_srun_that_waits_gets_sigterm(tmp_path: Path) -> None:
    got, ready = tmp_path / "got", tmp_path / "ready"
    waits = (
        f'trap "touch {got}; exit" TERM; touch {ready}; while :; do sleep 0.05; done'
    )
    with Agents({"n1": ["bash", "-c", waits]}) as agents:
        ask(agents, "double", timeout_s=0.3, value=1)
        until(ready.exists)
    assert got.exists()


def test_answers_are_decoded() -> None:
    with Agents({"n1": COMMAND}) as agents:
        arguments = {"n1": {"value": 1}}
        assert agents.ask("double", arguments, PATIENCE_S, int) == {"n1": 2}
        error = agents.ask("double", arguments, PATIENCE_S, str)["n1"]
        assert isinstance(error, AgentError)
        assert error.message.startswith("its answer is not understood (2 is no str)")
