"""Model cards, uploads and full caches, by the real client of the hub and a hub on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, metadata_eval_result

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.files import to_json, write_json
from slurmft.runs.rundir import RunDir
from slurmft.train import own_task
from slurmft.train.commands import fetch
from slurmft.train.commands.push import check_finished
from slurmft.train.config import TrainConfig, resolved
from slurmft.train.login import model_card
from slurmft.train.task_facts import TASKS
from tests.conftest import Done, assert_two_lines, slurmft
from tests.support.hub import NAME, Hub
from tests.support.made_runs import write_run
from tests.support.models import write_compared, write_sentence_model

pytestmark = pytest.mark.processes

RESULT: dict[str, Any] = {
    "metrics": {"accuracy": 0.9215, "f1": None}, "loss": 0.1234567, "steps": 1500, "wall_s": 75.2,
    "nodes": 2, "world_size": 8, "train_samples_per_s": 812.25, "precision": "bf16",
    "global_batch_size": 256, "backend": "gloo", "phases_s": {"train": 60.0},
    "optimizer": "muon", "learning_rate": 8e-3,
}  # fmt: skip
TOKEN = "hf_" + "x1" * 17


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> RunDir:
    """A run as it is after its end."""
    train = TrainConfig.resolve(task="emotion", model=str(tiny_model))
    made = RunDir.create(
        RunConfig(
            program=train.program(), job=JobConfig(runs_dir=str(tmp_path / "a b"))
        )
    )
    made.model.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (made.model / name).write_bytes((tiny_model / name).read_bytes())
    (made.model / "notes.bin").write_bytes(b"no model")
    write_json(made.result, RESULT)
    write_json(made.environment, {"versions": {"torch": "2.13.0", "slurmft": "0.1"}})
    made.set_state("finished")
    return made


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[Hub]:
    with Hub(tiny_model) as started:
        yield started


def data_of(text: str) -> Any:
    """The metadata, as the hub's own library reads it."""
    return ModelCard(text).data


def test_card(run: RunDir) -> None:
    """As the hub's own library reads it; without paths."""
    model_card.write(run, RESULT)
    text = (run.model / "README.md").read_text()
    found = data_of(text)
    assert found.library_name == "transformers"
    assert found.pipeline_tag == "text-classification"
    assert found.datasets == ["dair-ai/emotion"]
    assert found.base_model is None  # a folder
    (metric,) = found.eval_results
    assert (metric.metric_type, metric.metric_value) == ("accuracy", 0.9215)
    for words in (
        "| accuracy | 0.9215 |",
        "1,500 optimizer steps in 75 s on 2 node(s) with 8",
    ):
        assert words in text
    for words in (
        "| optimizer | muon |",
        "| learning_rate | 0.0080 |",
        "torch 2.13.0",
        'pipeline("text-classification"',
    ):
        assert words in text
    assert f"\n# {run.path.name}\n" in text
    assert str(run.path.parent) not in text
    assert "/" not in text.split("fine-tuned on")[0].split("# ")[1]


def test_card_has_the_form_of_the_hub() -> None:
    """A metric is what the library's own function would write, with the words that are shown."""
    train = TrainConfig.resolve(task="mrpc", model="me/base", lora=4)
    facts = RESULT | {
        "metrics": {"f1_macro": 0.8, "f1": 0.7, "f1_micro": None},
        "epochs": 0.23,
    }
    text = model_card.text(train, facts, {}, "a-run")
    found = data_of(text)
    own = metadata_eval_result(
        model_pretty_name="a-run", task_pretty_name="Text Classification",
        task_id="text-classification", metrics_pretty_name="Macro F1", metrics_id="f1",
        metrics_value=0.8, dataset_pretty_name="nyu-mll/glue", dataset_id="nyu-mll/glue",
        dataset_config="mrpc", dataset_split="validation",
    )  # fmt: skip
    (results,) = found.to_dict()["model-index"]
    (result,) = results["results"]  # one for the data, whatever the metrics
    (expected,) = own["model-index"][0]["results"]
    assert result["metrics"][0] | {"verified": False} == expected["metrics"][0]
    assert (result["task"], result["dataset"]) == (
        expected["task"],
        expected["dataset"],
    )
    assert [metric["name"] for metric in result["metrics"]] == ["Macro F1", "F1"]
    assert (found.metrics, found.datasets, found.base_model) == (
        ["f1"],
        ["nyu-mll/glue"],
        "me/base",
    )
    assert (found.library_name, found.base_model_relation) == ("peft", "adapter")
    assert "| epochs | 0.2300 |" in text  # what was done, not what was asked for


def test_card_of_a_model_of_the_hub() -> None:
    train = TrainConfig.resolve(task="squad", data="/secret/place/squad", batch_size=24)
    # As where nothing was chosen but what was asked for.
    text = model_card.text(train, RESULT | {"batch_size": None}, {}, "a run")
    assert "| batch_size | 24 |" in text
    assert data_of(text).base_model == "distilbert-base-uncased"
    assert data_of(text).pipeline_tag == "question-answering"
    assert "secret" not in text


def push(hub: Hub, run: RunDir, *more: str, token: str = TOKEN) -> Done:
    env = {
        "HF_ENDPOINT": hub.url(),
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    return slurmft("push", str(run.path), "me/emotions", *more, env=env)


def test_push(hub: Hub, run: RunDir) -> None:
    done = push(hub, run)
    assert done.code == 0, done.err
    assert done.out.startswith(f"private: {hub.url()}")
    assert hub.repos == {"me/emotions": True}
    assert hub.tokens == {TOKEN}
    files = {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert set(hub.uploaded) == files  # no pickle
    for name in files:
        assert hub.uploaded[name] == (run.model / name).read_bytes()
    (run.model / "README.md").write_text("---\nlibrary_name: transformers\n---\nmine\n")
    assert push(hub, run).code == 0  # again, with words of one's own
    assert hub.uploaded["README.md"].endswith(b"mine\n")


def test_push_takes_regular_files_alone(hub: Hub, run: RunDir, tmp_path: Path) -> None:
    """A link in the model's folder, as one to a key, or something else in the place of a file."""
    os.mkfifo(run.model / "fifo.json")
    assert "not a regular file" in push(hub, run).err
    # Nothing half-made is left, there or here.
    assert not hub.repos
    assert not (run.model / "README.md").exists()
    (run.model / "fifo.json").unlink()
    (tmp_path / "key").write_text("secret")
    (run.model / "sub").mkdir()
    (run.model / "sub" / "x.json").write_text("{}")
    assert push(hub, run).code == 0
    assert hub.uploaded.pop("sub/x.json") == b"{}"
    for place in ("notes.txt", "sub/x.json"):
        hub.uploaded.clear()
        path = run.model / place
        path.unlink(missing_ok=True)
        path.symlink_to(tmp_path / "key")
        done = push(hub, run)
        assert done.code != 0
        assert f"model/{place}" in done.err
        assert not hub.uploaded
        path.unlink()


def test_push_refused(hub: Hub, run: RunDir) -> None:
    hub.repos["me/emotions"] = False
    done = push(hub, run)
    assert_two_lines(done, "the repository me/emotions is public")
    assert not hub.uploaded
    assert push(hub, run, "--public").code == 0
    hub.repos.clear()
    done = push(hub, run, token="")
    assert done.code == 1
    assert "the hub did not take 'me/emotions'" in done.err
    assert "hf auth login" in done.err


@pytest.mark.parametrize("state", ["running", "failed"])
def test_run_that_has_not_finished(state: str, tmp_path: Path) -> None:
    config = RunConfig(
        program=TrainConfig.resolve().program(), job=JobConfig(runs_dir=str(tmp_path))
    )
    run = RunDir.create(config)
    run.set_state(state)
    with pytest.raises(UsageError, match=f"has not finished: it is {state}") as error:
        check_finished(run)
    # As it can be typed: nothing is resumed that still runs.
    command = {"running": "follow", "failed": "resume"}[state]
    assert str(error.value.hint).endswith(f": slurmft {command} {run.path}")


@pytest.mark.parametrize(
    ("kind", "settings", "hint"),
    [
        ("predict", {"model": "/r/a/model"}, "the run that trained the model: /r/a"),
        ("own", {}, "leaves its model elsewhere"),
        ("train", {}, "was it moved away?"),
    ],
)
def test_run_without_a_model(
    kind: str, settings: dict[str, Any], hint: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "a")
    config = json.loads(run.config.read_text())
    config["program"] |= {"kind": kind, "settings": settings}
    write_json(run.config, config)
    with pytest.raises(UsageError, match="holds no model") as error:
        check_finished(run)
    assert hint in str(error.value.hint)


def test_fetch(hub: Hub, tmp_path: Path, tiny_data: Path) -> None:
    """The model comes from the hub, the data is a folder; then all loads from the cache."""
    env = {"HF_ENDPOINT": hub.url(), "HF_HOME": str(tmp_path / "hf home")}
    done = slurmft("fetch", NAME, str(tiny_data), env=env)
    assert done.code == 0, done.err
    assert hub.fetched["model.safetensors"] == 1
    assert f"{tiny_data}: a folder, nothing to fetch" in done.out
    assert f"{NAME}: 0.0M parameters" in done.out
    assert "iB in " + str(tmp_path / "hf home") in done.out
    assert "train 203 rows" in done.out


@pytest.mark.extra("caches")
def test_fetch_of_modules(tmp_path: Path) -> None:
    """All that makes the vectors of a model of sentence-transformers is in the cache then."""
    base = write_sentence_model(tmp_path / "base")
    with Hub(base) as hub:
        env = {"HF_ENDPOINT": hub.url(), "HF_HOME": str(tmp_path / "hf")}
        data = write_compared(tmp_path / "data", {"train": 3, "validation": 2})
        done = slurmft("fetch", NAME, str(data), "--task", "embeddings", env=env)
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "hf/hub/models--team--tiny-bert/snapshots").iterdir()
    fetched = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert fetched >= {
        *("modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"),
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to fetch"),
        (("--text-column", "body"), "nothing to fetch"),
        (("--task", "synthetic"), "needs nothing from the hub"),
        (("/no/model",), "--model '/no/model': no such folder"),
    ],
)
def test_nothing_to_fetch(arguments: tuple[str, ...], words: str) -> None:
    done = slurmft("fetch", *arguments)
    assert done.code == 2
    assert words in done.err


def test_columns_of_a_fetch() -> None:
    """As a run reads them: which rows are of a part depends on their classes."""
    flags = ["--task", "text-classification", "--text-column", "body"]
    flags += ["--label-column", "team", "--validation-fraction", "0.2"]
    parsed = fetch.parser().parse(["team/model", "team/data", *flags])
    train = fetch.configure(parsed)
    assert (train.text_column, train.label_column) == ("body", "team")
    settings = json.loads(to_json(dataclasses.asdict(train)))
    assert TrainConfig.resolve(**settings) == resolved(train)


def test_metrics_that_a_fetch_takes_from_the_hub() -> None:
    """Of a task with presets, the names of all are its own; with one, those of this one."""
    for task in TASKS:
        presets = (None, *TASKS[task].preset_metrics)
        for preset in presets:
            own = own_task.metrics(task, preset)
            assert fetch._scripts(own, task, preset) == []
            assert fetch._scripts(own, task, None) == []
            assert fetch._scripts(["wer", *own, "loss"], task, preset) == ["wer"]
    assert fetch._scripts(["spearman"], "embeddings", "pairs") == ["spearman"]
    assert fetch._scripts(["spearman"], None, None) == ["spearman"]


def test_fetch_of_what_is_not_there(hub: Hub, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": hub.url(), "HF_HOME": str(tmp_path)}
    done = slurmft("fetch", "team/other", "--task", "emotion", env=env)
    assert done.code == 2
    *_, error, hint = done.err.splitlines()
    assert error.startswith("error: --model 'team/other' was not found locally or on")
    assert "look for its name on the hub" in hint


def test_fetch_without_a_hub(tmp_path: Path) -> None:
    """It says which hub it asks, asks once, and names what helps."""
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = slurmft("fetch", "team/other", "--task", "emotion", env=env)
    assert_two_lines(done, "--model 'team/other' was not found locally or on the hub")
    assert "copy the folder of $HF_HOME" in done.err
    assert done.out.splitlines() == [
        "asking http://127.0.0.1:9",
        "it does not answer this machine: only the caches are left",
        "loading without the hub",
    ]
