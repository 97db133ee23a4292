"""What a report names of our runs that is not as in the published ones beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmft.plugins.studies import spec
from slurmft.train import recipes
from tests.plugins.studies.test_report import PUBLISHED, report
from tests.support import CHECKOUT
from tests.support.made_runs import write_run

TABLES = {
    "mn4-benchmark": "mn4_benchmark",
    "mn4-emotion": "mn4_emotion",
    "icelake-mrpc": "icelake_glue",
    "icelake-qqp": "icelake_glue",
    "spr-squad": "sapphire_rapids_squad",
}


def departures_of(folder: Path, table: str) -> str:
    """Returns the note of a report, and what follows it; "" where nothing departs."""
    text = report(folder, "--published", PUBLISHED / f"{table}.json")
    in_one_line = " ".join(text.split())
    assert "published / ours" in in_one_line
    return in_one_line.partition("not as published: ")[2]


@pytest.mark.processes
def test_small_run_beside_a_published_one(tmp_path: Path) -> None:
    """64 rows of a small model, packed, beside 3,668 of DistilBERT, padded."""
    write_run(
        tmp_path / "run",
        task="mrpc",
        model="/gpfs/tiny",
        nodes=1,
        nproc_per_node=2,
        batch_size=8,
        precision="bf16",
        result={"train_samples": 192, "epochs": 3.0},
    )
    departures = departures_of(tmp_path, "icelake_glue")
    for text in (
        "model /gpfs/tiny (distilbert-base-uncased)",
        "train samples 64 (3,668)",
        "batching packed (padded)",
        "processes a node 2 (1)",
        "batch size 8 (32)",
        "precision bf16 (fp32)",
    ):
        assert text in departures


@pytest.mark.processes
def test_speedup_over_another_number_of_nodes_is_not_compared(tmp_path: Path) -> None:
    """Ours on two nodes is 1 where nothing was measured on one; 1.7 is published over one."""
    write_run(tmp_path / "two", recipe="icelake-mrpc", nodes=2, nproc_per_node=1)
    text = report(tmp_path, "--published", PUBLISHED / "icelake_glue.json")
    assert "none of our runs has the published base, nodes 1" in " ".join(text.split())
    assert re.search(r"^mrpc +2 +279 +\S+ +1\.7 +n/a$", text, re.MULTILINE)


@pytest.mark.processes
def test_published_accuracy_stands_beside_ours_not_beside_our_f1(
    tmp_path: Path,
) -> None:
    metrics = {"f1_macro": 0.25, "accuracy": 0.75}
    write_run(
        tmp_path / "run",
        recipe="mn4-emotion",
        nodes=1,
        nproc_per_node=1,
        result={"metrics": metrics, "primary_metric": "f1_macro"},
    )
    text = report(tmp_path, "--published", PUBLISHED / "mn4_emotion.json")
    assert re.search(r"^ +1 +256 +0\.9375 +0\.7500 ", text, re.MULTILINE)
    assert "is compared with the published accuracy" not in text


@pytest.mark.processes
@pytest.mark.parametrize("recipe", ["icelake-mrpc", "icelake-qqp", "spr-squad"])
def test_recipe_as_published_departs_in_nothing(recipe: str, tmp_path: Path) -> None:
    samples = recipes.PUBLISHED[recipe]["train_samples"]
    epochs = recipes.RECIPES[recipe]["epochs"]
    write_run(
        tmp_path / "run",
        recipe=recipe,
        as_published=True,
        model="/gpfs/distilbert-base-uncased",
        nodes=1,
        result={"train_samples": samples * epochs, "epochs": float(epochs)},
    )
    assert departures_of(tmp_path, TABLES[recipe]) == ""


@pytest.mark.parametrize("recipe", TABLES)
def test_texts_padded(recipe: str) -> None:
    published = recipes.fill({"recipe": recipe, "as_published": True})
    assert published["batching"] in ("padded", "dynamic")
    assert recipes.fill({"recipe": recipe})["batching"] == "packed"
    assert recipes.of_table(TABLES[recipe], published["task"]) == recipe
    # Every change is one that a report can name.
    assert set(recipes.CHANGES[recipe]) <= set(recipes.fill({"recipe": recipe}))


def test_default_of_a_task_has_the_changes_of_its_recipe() -> None:
    assert recipes.fill({"preset": "paper"})["batching"] == "packed"
    paper = recipes.fill({"preset": "paper", "as_published": True})
    assert paper["batching"] == "dynamic"


def test_processes_of_the_published_single_node() -> None:
    """The base of the speedup of SQuAD has one process, and so has the study's."""
    given = {"recipe": "spr-squad", "as_published": True}
    for nodes, processes in ((1, 1), (4, 2)):
        filled = recipes.fill(given | {"nodes": nodes})
        assert filled["nproc_per_node"] == processes
    study = spec.read_study(CHECKOUT / "results" / "studies" / "spr-squad.toml")
    assert [tuple(cell.values()) for cell in study.cells] == [(1, 1), (4, 2)]
