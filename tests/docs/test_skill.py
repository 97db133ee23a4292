"""The page for assistants: its commands are run one after another, as it tells them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from slurmft.cluster.facts import run_facts
from slurmft.cluster.pending import Waiting
from slurmft.core import shipped
from slurmft.runs.rundir import RunDir
from tests.conftest import Done, slurmft

SKILL = shipped.FOLDER / "skill" / "SKILL.md"


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", SKILL.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_front_matter() -> None:
    """As assistants read it: a name, and when to use it, in one line each."""
    _, head, _ = SKILL.read_text().split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert fields.keys() == {"name", "description"}
    assert len(fields["description"]) <= 1024


@pytest.mark.extra("docs")
@pytest.mark.processes
def test_the_ten_tasks(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / ".config/slurmft/site.toml"
    site.parent.mkdir(parents=True)
    lines = {"cluster": "local", "model": str(tiny_model), "precision": "fp32"}
    site.write_text("".join(f'{key} = "{value}"\n' for key, value in lines.items()))
    shutil.copytree(shipped.FOLDER / "tickets", tmp_path / "tickets")
    monkeypatch.chdir(tmp_path)
    answers: dict[str, Done] = {}
    for command in commands():
        _, *words = shlex.split(command)
        done = slurmft(*words, imported=True)
        # The page says so: a finished run is not resumed.
        expected = 2 if words[0] == "resume" else 0
        assert done.code == expected, (command, done.err)
        answers[words[0]] = done
    data = json.loads(answers["data"].out)
    assert data["warnings"] == []
    run = RunDir.open(json.loads(answers["submit"].out)["run"])
    facts = run_facts(run)
    assert facts["state"] == "finished"
    assert facts["model_path"] is not None
    assert Path(facts["model_path"]).is_dir()
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) > 1
    # Every name in backquotes that the page reads from JSON is there.
    named = {*facts, *data, *Waiting.__slots__}
    named |= {"error", "message", "hint", "exit_code", "where", "items", "bytes", "run"}
    others = {"submit", "resume", "cancel", "push", "last", "from_pretrained"}
    names = set(re.findall(r"`([a-z_]+)`", SKILL.read_text()))
    assert names <= named | others
