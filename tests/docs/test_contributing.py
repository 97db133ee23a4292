"""The pages for contributors: their code runs as it stands there."""

from __future__ import annotations

import math
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slurmft.__main__ import console
from slurmft.cluster.job_state import Phase
from slurmft.core import plugins
from slurmft.plugins.examine.checks import Level
from slurmft.plugins.trackers import adapters, trackers
from slurmft.plugins.trackers.options import TRACKERS
from slurmft.runs.rundir import RunDir
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from tests.docs.pages import PAGES
from tests.plugins.examine.nodes import system
from tests.plugins.trackers.test_trackers import START, make_run, step
from tests.support import CHECKOUT, until
from tests.support.models import write_reviews

ADDING = sorted(path for path in PAGES if path.name.startswith("add-"))
MOST_LINES = 60


def block(page: str, language: str) -> str:
    """The only block of a language on a page."""
    text = PAGES[CHECKOUT / "docs" / f"add-{page}.md"]
    (found,) = re.findall(
        rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    return str(found)


@pytest.fixture
def installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """A folder with the module and the entry points of a page, as pip installs them."""
    page = request.param
    folder = tmp_path / "site"
    metadata = folder / "contributed-1.0.dist-info"
    metadata.mkdir(parents=True)
    text = block(page, "python")
    name = text.removeprefix('"""').partition(".py:")[0]
    (folder / f"{name}.py").write_text(text)
    lines = []
    groups = tomllib.loads(block(page, "toml"))["project"]["entry-points"]
    for group, entries in groups.items():
        lines.append(f"[{group}]")
        lines += [f"{key} = {value}" for key, value in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{CHECKOUT}")
    monkeypatch.setattr(plugins, "_installed", plugins._installed.__wrapped__)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


@pytest.mark.parametrize("page", ADDING, ids=lambda page: page.stem)
def test_pages_are_short(page: Path) -> None:
    assert len(PAGES[page].splitlines()) <= MOST_LINES


def test_contributing_names_the_pages() -> None:
    text = PAGES[CHECKOUT / "docs/contributing.md"]
    assert len(ADDING) == 4
    for page in ADDING:
        assert f"]({page.name})" in text


@pytest.mark.parametrize("installed", ["a-launcher"], indirect=True)
@pytest.mark.processes
def test_launcher(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program runs by it to its end, and another is cancelled."""
    from slurmft import Run, run

    runs = str(tmp_path / "runs")
    words = ["run", "--cluster", "detached", "--runs-dir", runs]
    assert console([*words, "--dry-run", "--", "true"]) == 0
    assert "slurmft.cluster.local" in capsys.readouterr().out
    done = run("true", cluster="detached", runs_dir=runs)
    assert done.wait()["metrics"] == {}
    assert Run(done.path).state == Phase.FINISHED
    ended = run("sleep", "600", cluster="detached", runs_dir=runs)
    # A process that gets the signal before it begins leaves no record.
    until(lambda: RunDir(ended.path).get_state().state == "running")
    assert ended.state == Phase.RUNNING
    assert ended.cancel()
    until(lambda: ended.state == Phase.CANCELLED)


@pytest.mark.parametrize("installed", ["a-task"], indirect=True)
def test_task(installed: Path, tmp_path: Path, tiny_model: Path) -> None:
    """Its loss is that of the paper, (1 - p)^gamma times the cross entropy."""
    import torch

    data = write_reviews(tmp_path / "data", train=20, validation=10)
    columns = {"text_column": "review", "label_column": "stars"}
    config = TrainConfig.resolve(
        task="focal",
        task_option=("gamma=1.5",),
        model=str(tiny_model),
        data=str(data),
        **columns,
    )
    task: Any = tasks.get(config)
    prepared = task.prepare()
    assert len(prepared.train.labels) == 20
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    batch: Any = type("Batch", (), {"targets": {"labels": torch.tensor([0, 0])}})
    output: Any = type("Output", (), {"logits": logits})
    total, count = task.loss(output, batch)
    p = [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(1))]
    assert count == 2
    assert total.item() == pytest.approx(
        sum(-((1 - each) ** 1.5) * math.log(each) for each in p)
    )


def test_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    started: list[dict[str, Any]] = []
    logged: list[int] = []

    class Notebook:
        def __init__(self, project: str, **arguments: Any) -> None:
            started.append(arguments | {"mode": os.environ["NOTEBOOK_MODE"]})

        def start(self) -> None: ...
        def finish(self) -> None: ...
        def store_init_configuration(self, values: dict[str, Any]) -> None: ...

        def log(self, values: dict[str, float], step: int) -> None:
            logged.append(step)

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    monkeypatch.setattr(adapters, "ADAPTERS", dict(adapters.ADAPTERS))
    monkeypatch.setattr(
        "slurmft.plugins.trackers.options.TRACKERS", (*TRACKERS, "notebook")
    )
    monkeypatch.delenv("NOTEBOOK_MODE", raising=False)
    exec(block("a-tracker", "python"), {})
    run = make_run(tmp_path, "notebook")
    for first in (0, 7):
        tracking = trackers.Tracking(run)
        tracking.take(START)
        if first:
            tracking.take({"event": "resume", "step": first})
        tracking.take(step(first + 5))
        tracking.close()
        assert list(tracking.messages()) == []
    assert logged == [5, 12]
    place = {"logging_dir": str(run.tracking / "notebook"), "mode": "offline"}
    assert started == [place, place | {"purge_step": 8}]
    (command,) = trackers.next_commands(run)
    assert command.startswith("notebook show ")


def test_doctor_rule() -> None:
    names: dict[str, Any] = {}
    exec(block("a-doctor-rule", "python"), names)
    systems = {
        "n1": system(),
        "n2": system(available_mib=70),
        "n3": system(available_mib=70),
    }
    (check,) = names["free_memory"](systems, 500)
    assert check.level is Level.FAILURE
    assert check.line == "n2, n3: 70 MiB are free, the job asks for 500"
    assert check.figures == {"free_mib": 70}
    (check,) = names["free_memory"](systems, 50)
    assert check.level is Level.OK
