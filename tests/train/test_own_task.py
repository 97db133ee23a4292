"""Tasks of the user's own: the documented one trains, and what is wrong is told at submission."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from slurmft.core import plugins
from slurmft.core.errors import UsageError
from slurmft.train import own_task, tasks
from slurmft.train.commands import fetch
from slurmft.train.config import TrainConfig
from slurmft.train.login import model_card
from slurmft.train.login.predict import configure
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks import Task
from tests.conftest import slurmft
from tests.docs import pages
from tests.docs.world import OWN_TASK
from tests.support.made_runs import write_trained
from tests.support.models import write_reviews
from tests.train.test_predict import predicted

EXAMPLE = pages.block_that_begins(OWN_TASK, "python")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the documented task, and its data, under a name that Python has not cached."""
    name = f"reviews_{os.getpid()}_{tmp_path.name}".replace("-", "_")
    project = tmp_path / "my project"
    project.mkdir()
    (project / f"{name}.py").write_text(EXAMPLE)
    write_reviews(project / "data", train=300, validation=60)
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    return project


def task_of(folder: Path, name: str = "Stars") -> str:
    return f"{next(folder.glob('reviews_*.py')).stem}:{name}"


def test_documented_task_is_short() -> None:
    assert len(EXAMPLE.splitlines()) <= 60


@pytest.mark.extra("training")
def test_documented_task_trains(folder: Path, tiny_model: Path) -> None:
    """On two ranks, from the copy of the code that its run has; the options reach it."""
    name = task_of(folder)
    done = slurmft(
        "submit", "--cluster", "local", "--nodes", "2", "--follow", "--runs-dir", "runs",
        *("--task", name, "--task-option", "most=5", "--data", "data", "--model", str(tiny_model)),
        *("--epochs", "8", "--batch-size", "8", "--learning-rate", "0.01"),
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.result["metrics"]["within_one"] > 0.9
    assert set(done.result["metrics"]) == {"within_one", "exact", "loss"}
    assert done.run.path.name.startswith("Stars-")
    config = json.loads(done.run.config.read_text())
    assert config["program"]["code"] == str(done.run.code)
    copy = done.run.code / f"{name.partition(':')[0]}.py"
    next(folder.glob("reviews_*.py")).write_text("raise SystemExit('edited later')")
    assert copy.read_text() == EXAMPLE
    of_run = f"from slurmft.train.own_task import load, use_code; use_code({str(done.run.code)!r})"
    subprocess.run(
        [sys.executable, "-c", f"{of_run}; load({name!r})"], cwd=folder, check=True
    )
    model = json.loads((done.run.path / "model/config.json").read_text())
    assert len(model["id2label"]) == 4
    # By the copy, too: the file here raises now.
    file = folder / "data/validation.jsonl"
    predicted = slurmft(
        *("predict", str(done.run.path), str(file), "--cluster", "local", "--follow"),
        *("--runs-dir", "runs", "--output", "out.jsonl"),
    )
    assert predicted.code == 0, predicted.err
    rows = [
        json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()
    ]
    # `stars` is a column of that file.
    exact = [row["stars"] == row["predicted_stars"] for row in rows]
    assert sum(exact) / len(exact) == done.result["metrics"]["exact"]


@pytest.mark.processes
def test_task_of_a_run_is_imported_as_the_run_has_it_and_not_from_the_present_folder(
    tmp_path: Path,
) -> None:
    """Also where the run's code lacks it: others may write in the folder of a command."""
    code = tmp_path / "code"
    here = tmp_path / "here"
    for folder in (code, here):
        folder.mkdir()
        for name in ("numpy", "statistics", "evil"):
            folder.joinpath(f"{name}.py").write_text("print(__file__)\nStars = 1\n")
    for code_folder, module, imported in (
        (str(code), "evil", [f"{code}/evil.py"]),
        ("", "evil", []),
        ("", "statistics", []),
    ):
        script = (
            "from slurmft.core.program import Program\n"
            "from slurmft.train import own_task\n"
            "from slurmft.train.config import TrainConfig\n"
            f"settings = {{'task': '{module}:Stars'}}\n"
            "program = Program(kind='train', name='x', module='x', needs_hub=False, paths=(),\n"
            f"    code={code_folder!r}, settings=settings)\n"
            "TrainConfig.of(program)\n"
            "try:\n    own_task.load(settings['task'])\n"
            "except own_task.UsageError:\n    pass\n"
        )
        command = [sys.executable, "-P", "-c", script]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == imported


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        (
            {"task": "no_such_module_here:Stars"},
            "ModuleNotFoundError",
            "package.module:Class",
        ),
        ({"task": "json:loads"}, "is no subclass of", "derive it"),
        ({"task": "json:nothing"}, "AttributeError", "package.module:Class"),
        ({"task": "nothing"}, "nothing", "emotion"),
        (
            {"task": "Stars", "task_option": ("least=1",)},
            "'least=1': no option",
            "most=5",
        ),
        (
            {"task": "Stars", "task_option": ("most=many",)},
            "must be a whole number",
            "",
        ),
        (
            {"task": "emotion", "task_option": ("most=1",)},
            "no option of --task emotion",
            "none",
        ),
    ],
)
def test_mistakes(
    given: dict[str, object], message: str, hint: str, folder: Path
) -> None:
    if given["task"] == "Stars":
        given = given | {"task": task_of(folder)}
    with pytest.raises(UsageError, match=message) as error:
        TrainConfig.resolve(**given)
    assert hint in (error.value.hint or "")


def test_task_that_lacks_something(folder: Path) -> None:
    file = next(folder.glob("reviews_*.py"))
    file.write_text(
        EXAMPLE
        + "\n\nfrom slurmft.train.tasks import Task\n\n\nclass Half(Task):\n    pass\n"
        "\n\nclass NoFacts(Pretrained):\n    prepare = model = None\n"
    )
    with pytest.raises(
        UsageError, match=r"lacks model\(\), prepare\(\), save_tokenizer\(\)"
    ):
        own_task.load(task_of(folder, "Half"))
    with pytest.raises(UsageError, match="lacks facts"):
        own_task.load(task_of(folder, "NoFacts"))


PREDICTING = """

from slurmft.train.tasks import Task, sequence


class OtherLoss(sequence.Task):
    facts = TaskFacts(labels=("a", "b"))

    def loss(self, output, batch):
        raise NotImplementedError


class OtherPredict(OtherLoss):
    def predict(self, output, batch, data):
        return output.logits.argmin(dim=-1)


class Bare(Task):
    facts = TaskFacts(labels=("a", "b"))
    prepare = model = save_tokenizer = lambda *arguments: None
"""


def test_tasks_that_can_predict(folder: Path) -> None:
    """What a task lacks is said at submission, before anything is computed."""
    file = next(folder.glob("reviews_*.py"))
    file.write_text(EXAMPLE + PREDICTING)
    for name in ("emotion", task_of(folder), task_of(folder, "OtherLoss")):
        own_task.check_predicts(name)
    with pytest.raises(
        UsageError, match=r"has its own predict\(\), and no pred"
    ) as error:
        own_task.check_predicts(task_of(folder, "OtherPredict"))
    assert error.value.hint
    with pytest.raises(UsageError, match=r"it has no unlabelled\(\)") as error:
        own_task.check_predicts(task_of(folder, "Bare"))
    assert "Pretrained" in (error.value.hint or "")


def test_columns_of_a_task(folder: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Those that it says; as many values as rows."""
    name = task_of(folder)
    saved = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=4)
    saved.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    run = write_trained(tmp_path / "runs/stars", tmp_path / "model", task=name)
    file = folder / "data/validation.jsonl"
    config = configure(run, file, tmp_path / "out.jsonl", False, {})
    assert config.program.code == str(folder)
    columns = predicted(config, tmp_path / "tokens")
    assert columns.keys() == {"predicted_stars"}
    assert len(columns["predicted_stars"]) == 60
    assert set(columns["predicted_stars"]) <= {1, 2, 3, 4, 5}
    own_task.load(name).prediction_columns = lambda *arguments: {"stars": [1]}
    with pytest.raises(UsageError, match="has 1 values of 'stars' for 60 rows"):
        predicted(config, tmp_path / "more tokens")


def test_installed_task_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the environment lies in the folder of submission."""
    monkeypatch.setattr(sysconfig, "get_path", lambda kind: str(tmp_path / "site"))
    for place in ("site", "project"):
        (tmp_path / place).mkdir()
        name = f"stars_in_{place}"
        (tmp_path / place / f"{name}.py").write_text(EXAMPLE)
        monkeypatch.syspath_prepend(str(tmp_path / place))
        expected = "" if place == "site" else str(tmp_path / place)
        assert own_task.code(f"{name}:Stars") == expected


def test_card_of_an_own_task_imports_nothing_of_it() -> None:
    """Whoever pushes a run need not have, or trust, its code."""
    train = TrainConfig(
        task="nowhere_to_be_found:Stars", model="me/model", data="me/stars"
    )
    result = {
        "pipeline": "text-classification", "metrics": {"exact": 0.5}, "steps": 1, "wall_s": 1.0,
        "nodes": 1, "world_size": 1, "train_samples_per_s": 1.0, "loss": 0.5,
    }  # fmt: skip
    text = model_card.text(train, result, {}, "a run")
    assert "pipeline_tag: text-classification" in text


@pytest.mark.processes
def test_rows_are_checked_at_submission(folder: Path, tiny_model: Path) -> None:
    with open(folder / "data/validation.jsonl", "a") as file:
        file.write('{"review": "joy", "stars": "many"}\n')
    done = slurmft(
        "submit", "--dry-run", "--task", task_of(folder), "--data", "data",
        *("--model", str(tiny_model)),
    )  # fmt: skip
    assert done.code == 2
    assert "row 61 has the label 'many'" in done.err
    assert "Traceback" not in done.err


@pytest.mark.processes
def test_login_node_imports_no_torch_for_an_own_task(folder: Path) -> None:
    code = (
        "import sys; from slurmft.train.config import TrainConfig; "
        f"TrainConfig.resolve(task={task_of(folder)!r}).program(); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package: the documented task, and what pip writes of its one entry point."""
    site = folder.parent / "site"
    metadata = site / "stars-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "entry_points.txt").write_text(
        "[slurmft.tasks]\nstars = stars_task:Stars\n"
    )
    (site / "stars_task.py").write_text(EXAMPLE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    plugins._installed.cache_clear()
    own_task.load.cache_clear()
    yield site
    plugins._installed.cache_clear()
    own_task.load.cache_clear()
    sys.modules.pop("stars_task", None)


def test_entry_point(package: Path) -> None:
    """A package offers a task by name: its own entry point is all that it declares."""
    config = TrainConfig.resolve(task="stars", data="data", model="me/model")
    task = tasks.get(config)
    assert type(task).__name__ == "Stars"
    assert isinstance(task, Task)
    with pytest.raises(UsageError, match="starz") as error:
        own_task.load("starz")
    assert "stars" in str(error.value.hint)
    assert (
        fetch.configure(
            fetch.parser().parse(["me/model", "data", "--task", "stars"])
        ).task
        == "stars"
    )


@pytest.mark.extra("training")
def test_entry_point_is_enough_for_a_run(package: Path, tiny_model: Path) -> None:
    """Submission, look at data and ranks find it by that name alone."""
    done = slurmft(
        "submit", "--cluster", "local", "--follow", "--runs-dir", "runs", "--task", "stars",
        *("--task-option", "most=5", "--data", "data", "--model", str(tiny_model)),
        *("--batch-size", "8", "--learning-rate", "0.01", "--max-steps", "2"),
    )  # fmt: skip
    assert done.code == 0, done.err
    assert set(done.result["metrics"]) == {"within_one", "exact", "loss"}


def test_each_task_of_ours_has_its_facts() -> None:
    """The entry points say where a task is, tasks.toml what it is: neither has a name more."""
    ours = [
        entry
        for entry in plugins.entries(plugins.TASKS).values()
        if entry.package == "slurmft"
    ]
    assert {entry.name for entry in ours} == set(TASKS)
