"""Every command that has --json prints what its schema says."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from slurmft.__main__ import console
from slurmft.cli import schema
from slurmft.cluster.slurm import commands
from slurmft.core import shipped
from slurmft.core.errors import UsageError
from tests.cli.test_damaged_files import (
    FAILED,
    FINISHED,
    LOCAL,
    OWN_RUN,
    call_slurm,
    write_world,
)
from tests.cluster.test_submit import Queue, queue
from tests.support import CHECKOUT
from tests.support.json_output import assert_fits, json_parsers
from tests.support.made_runs import write_run, write_trained

__all__ = ["queue"]

TRAINED = "runs/trained"
READING: dict[str, list[list[str]]] = {
    "clean": [["--dry-run", "--older-than", "0s"]],
    "data": [["tickets"]],
    "doctor": [["--quick", "--cluster", "local"]],
    "doctor locks": [["."]],
    "list": [[], ["--cost"], ["--ettr"], ["--cost", "--ettr"]],
    "logs": [[FAILED], [LOCAL]],
    "plan": [[FINISHED, "two"]],
    "report": [[FINISHED, OWN_RUN, "--compare"]],
    "status": [[FINISHED], [FAILED], [LOCAL], [OWN_RUN]],
    "study status": [["studies/small"]],
}
SUBMITTING: dict[str, list[list[str]]] = {
    "cancel": [[LOCAL]],
    "predict": [[TRAINED, "rows.csv"], [TRAINED, "rows.csv", "--dry-run"]],
    "resume": [[LOCAL, "--dry-run"], [LOCAL]],
    "run": [["--", "true"], ["--dry-run", "--", "true"]],
    "submit": [["--task", "synthetic"], ["--task", "synthetic", "--dry-run"]],
}
"""Those that a scheduler takes part in."""


@pytest.fixture
def world(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_world(tmp_path)
    write_trained(tmp_path / TRAINED, tiny_model, task="emotion")
    write_run(tmp_path / "two", nodes=2)
    shutil.copytree(shipped.FOLDER / "tickets", tmp_path / "tickets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURMFT_SITE", str(tmp_path / "site.toml"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(commands, "call", call_slurm)
    monkeypatch.setattr(commands, "available", lambda: False)
    return tmp_path


def test_every_command_is_asked() -> None:
    """And stands on the page."""
    assert READING.keys() | SUBMITTING.keys() == json_parsers().keys()
    page = (CHECKOUT / "docs/json.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    assert (
        set(re.findall("`(.*?)`", " ".join(rows))) - {"--json"} == json_parsers().keys()
    )


def test_list_and_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema.main([]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == sorted(json_parsers())
    with pytest.raises(UsageError) as caught:
        schema.main(["stats"])
    assert caught.value.hint == "did you mean status?"


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["status", "nobody", "--json"]
    assert console(words) == 2
    assert_fits(words, capsys.readouterr().out)


@pytest.mark.parametrize("name", json_parsers())
def test_schema(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert json_parsers()[name].printed, "say by add_json what it prints"
    assert schema.main(name.split()) == 0
    printed = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(printed)
    # Nothing passes for an answer that is none.
    validator = Draft202012Validator(printed)
    assert not validator.is_valid({})
    assert not validator.is_valid({"error": {"message": "a", "hint": None}})


def test_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    """Also of fields that a class has of another, and of dataclasses."""
    schema.main(["status"])
    definitions = json.loads(capsys.readouterr().out)["$defs"]
    facts = definitions["RunFacts"]["properties"]
    assert facts["submitted"]["description"] == "ISO time."
    assert facts["requeues"]["description"].startswith("How often the job was requeued")
    reason = definitions["Waiting"]["properties"]["reason"]
    assert reason["description"] == "Slurm's own word."


@pytest.mark.processes
@pytest.mark.parametrize("name", READING)
def test_reading(name: str, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _check(name, READING[name], capsys)


@pytest.mark.processes
@pytest.mark.parametrize("name", SUBMITTING)
def test_submitting(
    name: str, world: Path, queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    _check(name, SUBMITTING[name], capsys)


def _check(
    name: str, command_lines: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in command_lines:
        words = [*name.split(), "--json", *arguments]
        code = console(words)
        out, err = capsys.readouterr()
        assert code == 0, (words, err)
        assert_fits(words, out)
