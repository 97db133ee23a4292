"""`slurmft report`: tables of what runs measured, beside what was published."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmft.core import process, terminal
from slurmft.plugins.studies.report import build
from slurmft.plugins.studies.report.measures import (
    SCALED,
    Row,
    RunSet,
    group_by_study,
    rows_of,
    state_of,
)
from slurmft.plugins.studies.report.plots import charts_of
from slurmft.runs import scan
from tests.conftest import slurmft
from tests.support import CHECKOUT, PATIENCE_S
from tests.support.made_runs import write_run

pytestmark = pytest.mark.processes

PUBLISHED = CHECKOUT / "results" / "published"


def write_study(
    folder: Path, toml: str, cells: list[dict[str, Any]], repeats: int = 1, **more: Any
) -> None:
    """A study's folder: its file, and runs of some cells; these are its cells, if it names none."""
    (folder / "runs").mkdir(parents=True)
    if "[grid]" not in toml:
        tables = (
            "\n".join(f"{k} = {json.dumps(v)}" for k, v in cell.items())
            for cell in cells
        )
        toml += "".join(f"\n[[cells]]\n{table}" for table in tables)
    (folder / "study.toml").write_text(f'name = "{folder.name}"\n{toml}')
    for cell in cells:
        for repeat in range(1, repeats + 1):
            name = "-".join(map(str, cell.values())) + f"-{repeat}"
            study = {"name": folder.name, "cell": cell, "repeat": repeat}
            values = {"nproc_per_node": 1, "seed": repeat} | cell | more
            write_run(folder / "runs" / name, submission={"study": study}, **values)


def rows_in(folder: Path) -> list[Row]:
    found, _ = scan.find([folder])
    (runset,) = group_by_study(found)
    return rows_of(runset)


def scaled(row: Row) -> list[float | None]:
    """Its speedup and efficiency."""
    return [row.median(key) for key in SCALED]


def csv_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def report(*arguments: str | Path, **more: Any) -> str:
    done = slurmft("report", *map(str, arguments), **more)
    assert done.code == 0, done.err
    return done.out


# --- what runs measured ---------------------------------------------------------------------------


def test_a_row_is_a_cell_with_median_and_spread(tmp_path: Path) -> None:
    for seed, step_s in ((1, 0.1), (2, 0.11), (3, 0.2)):
        write_run(
            tmp_path / f"r{seed}", seed=seed, step_s=step_s, nodes=2, nproc_per_node=2
        )
    (row,) = csv_of(report(tmp_path, "--format", "csv"))
    assert (row["devices"], row["n"], row["state"]) == ("4", "3", "finished")
    numbers = [float(row[f"train_s{part}"]) for part in ("", "_min", "_max")]
    assert numbers == pytest.approx([2.2, 2.0, 4.0])
    assert float(row["train_samples_per_s_per_device"]) == pytest.approx(32 / 0.11)
    assert float(row["rest_s"]) == pytest.approx(7 - 5 - 1.021)
    assert (row["metric_name"], row["metric"]) == ("accuracy", "0.9")
    text = report(tmp_path)
    assert "2.20 ±82%" in text
    assert "torch 2.13.0" in text
    assert "0.1 0123456789" in text


def test_the_metric_is_the_primary_one(tmp_path: Path) -> None:
    metrics = {"metrics": {"f1": 0.8, "accuracy": 0.9}}
    write_run(tmp_path / "a", result=metrics)
    write_run(tmp_path / "b", result=metrics | {"primary_metric": "f1"}, nodes=2)
    write_run(tmp_path / "c", result=metrics | {"primary_metric": None}, nodes=4)
    rows = csv_of(report(tmp_path, "--format", "csv"))
    found = [(row["metric_name"], row["metric"]) for row in rows]
    assert found == [("accuracy", "0.9"), ("f1", "0.8"), ("metric", "")]


def test_strong_scaling_is_a_ratio_of_times(tmp_path: Path) -> None:
    toml = 'scaling = "strong"\nrepeats = 1\n'
    write_study(tmp_path / "s", toml, [{"nodes": 1}])
    write_study(tmp_path / "t", toml, [{"nodes": 4}], step_s=0.04)
    for run in (tmp_path / "t" / "runs").iterdir():
        config = run / "config.json"
        config.write_text(config.read_text().replace('"name": "t"', '"name": "s"'))
        run.rename(tmp_path / "s" / "runs" / run.name)
    one, four = rows_in(tmp_path / "s")
    assert scaled(one) == [1, 1]
    assert scaled(four) == pytest.approx([2.5, 0.625])


def test_weak_scaling_is_a_ratio_of_throughputs_a_device(tmp_path: Path) -> None:
    toml = 'scaling = "weak"\nrepeats = 1\nfixed = {max_steps = 20}\n'
    write_study(
        tmp_path / "s",
        toml,
        [{"nodes": 1, "batch_size": 8}, {"nodes": 4, "batch_size": 8}],
    )
    one, four = rows_in(tmp_path / "s")
    assert scaled(one) == [1, 1]
    assert scaled(four) == pytest.approx([4, 1])


def test_rows_of_many_cells_ask_each_run_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row was compared with each, and asked all runs what they are."""
    template = write_run(tmp_path / "run")
    run = scan.MeasuredRun.read(template.path)
    cells = [({"learning_rate": n / 1000}, [run]) for n in range(1, 101)]
    runset = RunSet("many", "Many", ["learning_rate"], cells)
    asked: list[Path] = []

    def is_own_program(self: scan.MeasuredRun) -> bool:
        asked.append(self.path)
        return False

    monkeypatch.setattr(scan.MeasuredRun, "is_own_program", property(is_own_program))
    assert len(rows_of(runset)) == 100
    assert len(asked) < 1000


def test_rows_are_compared_with_their_like(tmp_path: Path) -> None:
    """Equal global batches are alike; where no equal batch has as few devices, another one is."""
    cells = [(1, 64), (4, 16), (1, 16), (8, 128)]
    write_study(
        tmp_path / "s",
        'scaling = "strong"\nrepeats = 1',
        [{"nodes": n, "batch_size": b} for n, b in cells],
    )
    base = {
        (r.devices, r.cell["batch_size"]): (
            r.baseline.devices,
            r.baseline.cell["batch_size"],
        )
        for r in rows_in(tmp_path / "s")
        if r.baseline
    }
    assert base[4, 16] in ((1, 64), (1, 16))
    assert base[8, 128] == (1, 64)
    assert "batch size 128, nodes 8 is compared with batch size 64, nodes 1" in report(
        tmp_path / "s"
    )


def test_nothing_is_dropped(tmp_path: Path) -> None:
    toml = (
        'title = "All"\nscaling = "strong"\nrepeats = 2\n[grid]\nnodes = [1, 2, 4, 8]\n'
    )
    folder = tmp_path / "s"
    write_study(folder, toml, [{"nodes": 1}], repeats=2)
    for nodes, repeat, state in (
        (2, 1, "finished"),
        (2, 2, "failed"),
        (4, 1, "failed"),
        (4, 2, "failed"),
    ):
        study = {"name": "s", "cell": {"nodes": nodes}, "repeat": repeat}
        run = write_run(
            folder / "runs" / f"{nodes}-{repeat}", nodes=nodes, nproc_per_node=1, state=state,
            submission={"study": study},
        )  # fmt: skip
        if state == "failed":
            told = json.loads(run.state.read_text()) | {
                "reason": "out of memory\nrank 3"
            }
            run.state.write_text(json.dumps(told))
    rows = csv_of(report(folder, "--format", "csv"))
    assert [(r["nodes"], r["n"], r["state"]) for r in rows] == [
        ("1", "2", "finished"),
        ("2", "1", "1 of 2 failed: out of memory"),
        ("4", "0", "failed: out of memory"),
        ("8", "0", "missing"),
    ]
    text = report(folder)
    assert "n/a" in text
    assert "nodes 2: 1 of 2 failed: out of memory" in text


def test_a_study_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    for text, told in (
        ("name = 's'\nrepeats = many", "is not TOML"),
        ("name = 's'\n[grid]\nnods = [1]", "unknown key 'nods'"),
        ("name = 'other'\n[grid]\nnodes = [1, 2]", "is of the study 'other'"),
    ):
        folder = tmp_path / told.split()[-1].strip("'") / "s"
        write_study(folder, "repeats = 1", [{"nodes": 1}])
        (folder / "study.toml").write_text(text)
        found = " ".join(report(folder).split())
        assert "Problems: - missing runs are unknown: " in found
        assert told in found
        (row,) = rows_in(folder)
        assert row.state == ""


GLOBAL_BATCH = """\
scaling = "strong"
repeats = 1
[fixed]
recipe = "mn4-emotion"
global_batch_size = 512
[grid]
nodes = [1, 2, 4]
nproc_per_node = [1, 4]
"""


def test_missing_cells_have_the_batch_that_they_would_have(tmp_path: Path) -> None:
    """Their global batch, divided by their processes: so they stand beside what was published."""
    cell = {"nodes": 2, "nproc_per_node": 1}
    write_study(
        tmp_path / "s", GLOBAL_BATCH, [cell], recipe="mn4-emotion", batch_size=256
    )
    rows = {(r.cell["nodes"], r.devices): r for r in rows_in(tmp_path / "s")}
    batches = {at: row.value("batch_size") for at, row in rows.items()}
    assert batches == {
        (1, 1): 512,
        (1, 4): 128,
        (2, 2): 256,
        (2, 8): 64,
        (4, 4): 128,
        (4, 16): 32,
    }
    assert rows[4, 4].value("task") == "emotion"
    assert rows[4, 4].state == "missing"


def test_a_missing_cell_stands_beside_its_published_row(tmp_path: Path) -> None:
    toml = GLOBAL_BATCH.replace("512", "2048").replace("[1, 4]", "[4]")
    cell = {"nodes": 1, "nproc_per_node": 4}
    write_study(tmp_path / "s", toml, [cell], recipe="mn4-emotion", batch_size=512)
    out = report(
        tmp_path / "s", "--published", PUBLISHED / "mn4_emotion.json", "--format", "csv"
    )
    part = next(p for p in out.split("\n# ") if "published / ours" in p.splitlines()[0])
    found = {
        (r["gpus"], r["batch_size_per_gpu"]): r for r in csv_of(part.split("\n", 1)[1])
    }
    assert found["8", "256"]["state_ours"] == "missing"
    assert found["16", "128"]["state_ours"] == "missing"
    assert found["8", "128"]["state_ours"] == ""


def test_states_of_rows(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    write_run(tmp_path / "on", state="running", seed=7)
    found = {run.name: run for run in scan.find([tmp_path])[0]}
    good, on = found["good"], found["on"]
    assert state_of([good], 1) == ""
    assert state_of([], 3) == "missing"
    assert state_of([on], 1) == "running"
    assert state_of([good, on], 3) == "1 of 3 running, 1 of 3 missing"


def test_a_failed_repeat_that_was_done_again_does_not_count(tmp_path: Path) -> None:
    write_study(tmp_path / "s", "repeats = 1", [{"nodes": 1}])
    study = {"name": "s", "cell": {"nodes": 1}, "repeat": 1}
    write_run(
        tmp_path / "s" / "runs" / "old",
        nodes=1,
        state="failed",
        submission={"study": study},
    )
    (row,) = rows_in(tmp_path / "s")
    assert (row.state, len(row.runs)) == ("", 1)


def test_changed_code_and_versions_are_said(tmp_path: Path) -> None:
    write_run(tmp_path / "a", nodes=1)
    write_run(tmp_path / "b", nodes=2, versions={"torch": "2.12.0"})
    write_run(
        tmp_path / "c", nodes=4, submission={"git": {"commit": "fedcba9876543210"}}
    )
    text = " ".join(report(tmp_path).split())
    assert "CHANGED between runs: torch: 2.13.0 in most, 2.12.0 in nodes 2" in text
    assert (
        "CHANGED between runs: code: 0.1 0123456789 in most, 0.1 fedcba9876 in nodes 4"
        in text
    )


def test_a_run_that_never_began_has_changed_nothing(tmp_path: Path) -> None:
    """Such as one whose model is not there: it has recorded no versions."""
    write_run(tmp_path / "a", nodes=1)
    failed = write_run(tmp_path / "b", nodes=2, state="failed")
    failed.environment.unlink()
    text = report(tmp_path)
    assert "CHANGED" not in text
    assert "None" not in text


def test_results_with_foreign_values_are_rows_without_them(tmp_path: Path) -> None:
    odd: dict[str, Any] = {
        "phases_s": {"train": "long"},
        "metrics": [],
        "peak_memory_bytes": [],
        "wall_s": None,
    }
    write_run(tmp_path / "odd", result=odd)
    (row,) = csv_of(report(tmp_path, "--format", "csv"))
    assert (row["state"], row["train_s"], row["wall_s"], row["metric"]) == (
        "finished",
        "",
        "",
        "",
    )
    assert "n/a" in report(tmp_path)


def test_absurd_clocks_and_foreign_files(tmp_path: Path) -> None:
    for i, time in enumerate((1e15, float("nan"), "noon")):
        odd = write_run(
            tmp_path / f"odd{i}", submission={"study": None, "time": str(i)}
        )
        odd.state.write_text(
            json.dumps(json.loads(odd.state.read_text()) | {"time": time})
        )
    assert "runs: 3, 1 finished" in report(tmp_path)  # of two, state.json is damaged


# --- what was published ---------------------------------------------------------------------------


def test_published_files_alone() -> None:
    text = report(PUBLISHED / "mn4_emotion.json")
    assert re.search(r"^ +4 +256 +0\.941 +16\.55 +3\.655$", text, re.MULTILINE)
    assert "doubt: accuracy collapses at 8 and 16 GPUs" in text
    charts = report(PUBLISHED / "mn4_benchmark.json", "--format", "markdown")
    assert "| fp16-256" in charts
    assert charts.count("implies a speedup of 11.9") == 1


def test_published_speedups_are_computed_and_plotted(tmp_path: Path) -> None:
    """Beside those of the text: 10.7 and 11.1 on 16 GPUs."""
    out = report(PUBLISHED / "mn4_benchmark.json", "--output", tmp_path)
    assert "written to" in out
    text = (tmp_path / "tables.txt").read_text()
    # 16 x 1011 / 1364, and 16 x 1782 / 2559
    assert re.search(r"^fp16-256 +16 +1011 +11\.86$", text, re.MULTILINE)
    assert re.search(r"^ +2048 +16 +1782 +11\.14$", text, re.MULTILINE)
    for said in ("fp16-256 +16 +10.7", "2048 +16 +11.1"):
        assert re.search(said, text)
    page = (tmp_path / "report.html").read_text()
    assert "The text says 10.7 for fp16-256 on 16 GPUs." in page
    assert "The text says 11.1 for eval batch size 2048 on 16 GPUs." in page
    names = {file.stem for file in tmp_path.glob("*.svg")}
    prefix = "published-mn4-benchmark"
    for measured in ("train", "eval"):
        rate = f"{measured}-samples-per-s-per-gpu"
        assert {f"{prefix}-{rate}", f"{prefix}-{rate}-speedup"} <= names
    assert {f"{prefix}-metric-compute-s", f"{prefix}-broadcast-ms"} <= names


@pytest.mark.parametrize(
    "name", ["mn4_emotion", "icelake_glue", "sapphire_rapids_squad"]
)
def test_every_published_table_has_plots(name: str, tmp_path: Path) -> None:
    report(PUBLISHED / f"{name}.json", "--output", tmp_path)
    names = [file.stem for file in tmp_path.glob("*.svg")]
    assert any(stem.endswith("-speedup") for stem in names), names


def test_published_beside_ours(tmp_path: Path) -> None:
    for nodes, batch in ((1, 256), (2, 256), (3, 256)):
        write_run(
            tmp_path / str(nodes),
            task="emotion",
            nodes=nodes,
            nproc_per_node=1,
            batch_size=batch,
        )
    out = report(
        tmp_path, "--published", PUBLISHED / "mn4_emotion.json", "--format", "csv"
    )
    part = next(p for p in out.split("\n# ") if "published / ours" in p.splitlines()[0])
    found = {
        (r["gpus"], r["batch_size_per_gpu"]): r for r in csv_of(part.split("\n", 1)[1])
    }
    assert (found["2", "256"]["time_s"], found["2", "256"]["time_s_ours"]) == (
        "29.9",
        "2.0",
    )
    assert (found["8", "128"]["time_s"], found["8", "128"]["time_s_ours"]) == (
        "10.33",
        "",
    )
    assert (found["3", "256"]["time_s"], found["3", "256"]["time_s_ours"]) == (
        "",
        "2.0",
    )
    assert len(found) == 8
    text = report(tmp_path, "--published", PUBLISHED / "mn4_emotion.json")
    assert "doubt: accuracy collapses" in text
    assert "no speedup of ours" not in text
    departures = " ".join(text.split()).partition("not as published: ")[2]
    for words in ("epochs 2 (5)", "precision fp32 (fp16)", "batching packed (dynamic)"):
        assert words in departures


def test_a_study_names_what_to_compare_with(tmp_path: Path) -> None:
    toml = 'published = "../x.json"\nrepeats = 1\n'
    cells = [{"nodes": n, "eval_batch_size": 128} for n in (1, 2)]
    write_study(tmp_path / "s", toml, cells)
    (tmp_path / "s" / "x.json").write_text(
        (PUBLISHED / "mn4_benchmark.json").read_text()
    )
    text = report(tmp_path / "s")
    rows = [line.split() for line in re.findall(r"^ +128 .*$", text, re.MULTILINE)[:3]]
    assert rows == [
        ["128", "1", "2616", "1000"], ["128", "2", "2517", "500"], ["128", "4", "2347", "n/a"],
    ]  # fmt: skip


def test_text_fits_a_terminal(tmp_path: Path) -> None:
    for nodes in (1, 2, 4):
        for batch in (16, 32):
            for seed in (1, 2):
                cell: dict[str, Any] = {
                    "batch_size": batch,
                    "eval_batch_size": batch,
                }
                place = tmp_path / f"{nodes}-{batch}-{seed}"
                write_run(place, nproc_per_node=1, seed=seed, step_s=seed, **cell)
    assert max(map(len, report(tmp_path).splitlines())) <= 120


def test_narrow_terminals_keep_what_matters(tmp_path: Path) -> None:
    """Cells by the last parts of their paths, training time, and the metric."""
    for nodes in (1, 2):
        write_run(
            tmp_path / str(nodes),
            nodes=nodes,
            data=f"/gpfs/projects/abc/folder/{nodes}/data",
        )
    for width in (60, 80):
        text = report(tmp_path, env={"COLUMNS": str(width)})
        assert max(map(len, text.splitlines())) <= width
        table = text.partition("- a row has")[0]
        for word in ("1/data", "2/data", "accuracy", "train", "devices"):
            assert word in table
        assert "/gpfs" not in table
    rows = csv_of(report(tmp_path, "--format", "csv"))
    assert rows[0]["data"] == "/gpfs/projects/abc/folder/1/data"


# --- every metric, and curves ---------------------------------------------------------------------


@pytest.fixture
def with_f1(tmp_path: Path) -> Path:
    """Two runs with two metrics and three evaluations each."""
    for nodes in (1, 2):
        metrics = {"accuracy": 0.9, "macro_f1": {1: 0.81, 2: 0.82}[nodes]}
        run = write_run(
            tmp_path / "runs" / str(nodes), nodes=nodes, result={"metrics": metrics}
        )
        with run.records.open("a") as records:
            for epoch in (1, 2, 3):
                found = {"accuracy": 0.3 * epoch, "macro_f1": 0.2 * epoch}
                record = {
                    "event": "epoch",
                    "epoch": epoch,
                    "metrics": found,
                    "time": 1.0,
                }
                records.write(json.dumps(record) + "\n")
    return tmp_path / "runs"


@pytest.mark.extra("studies")
def test_every_metric_is_everywhere(with_f1: Path) -> None:
    texts = {
        form: report(with_f1, "--format", form)
        for form in ("text", "markdown", "latex")
    }
    for form, text in texts.items():
        assert "0.8100" in text, form
        assert "0.8200" in text, form
    rows = csv_of(report(with_f1, "--format", "csv"))
    assert [(row["metric"], row["metric_macro_f1"]) for row in rows] == [
        ("0.9", "0.81"), ("0.9", "0.82"),
    ]  # fmt: skip
    assert "metric_accuracy" not in rows[0]  # it is the primary one


def test_curves_over_steps_and_epochs(with_f1: Path) -> None:
    found, _ = scan.find([with_f1])
    (runset,) = group_by_study(found)
    charts = {chart.key: chart for chart in charts_of(rows_of(runset), runset, [])}
    assert {"metric", "metric_macro_f1"} <= charts.keys()  # over devices
    assert [y.median for _, y in charts["metric_macro_f1"].series["measured"]] == [
        0.81,
        0.82,
    ]
    curve = charts["metric-macro_f1"]
    assert (curve.x_label, curve.y_label) == ("epoch", "macro_f1")
    assert list(curve.series) == ["nodes 1", "nodes 2"]  # several runs in one plot
    points = [(x, round(y.median, 9)) for x, y in curve.series["nodes 2"]]
    assert points == [(1.0, 0.2), (2.0, 0.4), (3.0, 0.6)]
    steps, epochs = (charts[key].series["nodes 1"] for key in ("loss", "loss-epochs"))
    assert [y for _, y in steps] == [y for _, y in epochs]
    assert [x for x, _ in steps] == pytest.approx([20 * x for x, _ in epochs])


def test_repeats_of_a_single_cell_are_a_curve_each(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / f"seed-{seed}", seed=seed)
    found, _ = scan.find([tmp_path])
    (runset,) = group_by_study(found)
    (loss,) = (c for c in charts_of(rows_of(runset), runset, []) if c.key == "loss")
    assert list(loss.series) == ["seed-1", "seed-2", "seed-3"]


@pytest.mark.extra("latex")
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs a LaTeX: pdflatex")
def test_latex_fits_a_page(with_f1: Path, tmp_path: Path) -> None:
    """Many rows, long fields, and characters that mean something to LaTeX."""
    for i in range(90):
        write_run(
            with_f1 / f"x{i}",
            data=f"/gpfs/a_b/50%/c{i}&d/{'long-' * 6}e#f",
            batch_size=i + 1,
        )
    text = report(with_f1, "--format", "latex", "--title", "10 % of {all} & more")
    packages = r"\usepackage{booktabs,graphicx}"
    (tmp_path / "t.tex").write_text(
        rf"\documentclass{{article}}{packages}\begin{{document}}{text}\end{{document}}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    log = (tmp_path / "t.log").read_text(errors="replace")
    assert "Overfull" not in log
    assert "Float too large" not in log
    assert int(re.search(r"\((\d+) pages", log)[1]) > 2  # type: ignore[index]


def test_a_title_of_ones_own(tmp_path: Path) -> None:
    write_study(tmp_path / "s", 'title = "Of the file"', [{"nodes": 1}, {"nodes": 2}])
    write_run(tmp_path / "alone")
    text = report(tmp_path, "--title", "Mine")
    assert text.startswith("Mine: Of the file\n")
    assert "\nMine\n" in text


def test_the_title_tells_folders_apart(tmp_path: Path) -> None:
    """Most people's folder of runs is called so."""
    run = write_run(tmp_path / "lab" / "runs" / "bert-1").path
    (tmp_path / "lab" / "link").symlink_to(run.parent)
    assert build.title_of([run]) == "Run bert-1"
    assert build.title_of([run.parent]) == "Runs in lab/runs"
    assert build.title_of([tmp_path / "lab" / "link"]) == "Runs in lab/runs"
    assert build.title_of([tmp_path / "lab", run]) == "Runs in lab, bert-1"


# --- files ----------------------------------------------------------------------------------------


def test_files_hold_no_commands_to_a_terminal(tmp_path: Path) -> None:
    """A colleague's run may bring them; the files of a report are looked at on terminals, too."""
    hostile = "\x1b]0;title\x07 \x9b2J \u202e"
    build.write_report(tmp_path, [], [hostile], hostile, [Path(hostile)])
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert len(texts) == 4
    for text in texts:
        assert terminal.plain(text) == text
    page = (tmp_path / "report.html").read_text()
    assert "\\u001b]0;title\\u0007" in page


@pytest.mark.extra("studies")
def test_all_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for nodes in (1, 2, 4):
        write_run(
            tmp_path / "runs" / str(nodes),
            nodes=nodes,
            nproc_per_node=1,
            step_s=0.1 / nodes,
        )
    done = slurmft(
        "report", str(tmp_path / "runs"), "--output", str(tmp_path / "out" / "here")
    )
    assert done.code == 0, done.err
    names = {path.name for path in (tmp_path / "out" / "here").iterdir()}
    assert {"tables.txt", "tables.md", "tables.tex", "runs.csv", "report.html"} <= names
    plots = {n.removesuffix(".svg") for n in names if n.endswith(".svg")}
    assert plots == {n.removesuffix(".png") for n in names if n.endswith(".png")}
    assert {"runs-speedup", "runs-loss", "runs-train-s"} <= plots
    page = (tmp_path / "out" / "here" / "report.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page)) <= {
        pair for i in ids for pair in ((i, ""), ("", i))
    }


def test_tables_need_no_matplotlib(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "r")
    (tmp_path / "hide.py").write_text(
        "import sys, importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'matplotlib' else real(n, *a)\n"
        "from slurmft.__main__ import console\n"
        "code = console()\n"
        "print([m for m in ('matplotlib', 'torch', 'transformers', 'numpy') if m in sys.modules])\n"
        "raise SystemExit(code)\n"
    )
    command = [
        sys.executable,
        str(tmp_path / "hide.py"),
        "report",
        str(tmp_path / "runs"),
    ]
    for more in ([], ["--output", str(tmp_path / "out")]):
        done = subprocess.run(
            [*command, *more], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("[]\n")
    assert "pip install matplotlib" in done.stderr
    assert "pip install matplotlib" in (tmp_path / "out" / "report.html").read_text()


# --- mistakes -------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_listed(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    bad = write_run(tmp_path / "bad")
    bad.result.write_text('{"metrics": {"accu')
    text = report(tmp_path)
    assert "Could not be read:" in text
    assert "bad/result.json" in "".join(text.split("\n  "))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{empty}"], "holds no run"),
        (["{broken}"], "no run can be read"),
        (["{empty}/none"], "is not a folder"),
        (["{good}", "--format", "markdwon"], "did you mean markdown?"),
        (["{good}", "--output", "/proc/none"], "cannot write to '/proc/none'"),
        (["{good}", "--output", "{good}/config.json"], "cannot write to"),
        (["{good}/config.json"], "holds no published table"),
        (["{good}", "--published", "{empty}/x.json"], "cannot read published tables"),
        ([], "required: RUN|DIR|FILE"),
    ],
)
def test_mistakes_end_in_two_lines(
    arguments: list[str], told: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "good")
    write_run(tmp_path / "broken" / "r").config.write_text("{")
    places = {name: str(tmp_path / name) for name in ("empty", "good", "broken")}
    done = slurmft("report", *(a.format(**places) for a in arguments))
    assert done.code == 2
    assert told in done.err
    assert len(done.err.splitlines()) == 2


def test_published_values_that_are_no_points(tmp_path: Path) -> None:
    chart = {"columns": ["gpus", "time_s"], "rows": [[1, 3], [2, None], [4, "1"]]}
    (tmp_path / "chart.json").write_text(json.dumps(chart))
    rows = [[n, batch, n] for batch in range(1, 11) for n in (1, 2)] + [
        ["many", 1, None]
    ]
    table = {"columns": ["gpus", "batch_size_per_gpu", "speedup"], "rows": rows}
    (tmp_path / "rows.json").write_text(json.dumps(table))
    for name in ("chart", "rows"):
        out = report(
            tmp_path / f"{name}.json", "--output", tmp_path / "out", "--format", "csv"
        )
        assert len(csv_of(out.partition("\n")[2])) == (
            3 if name == "chart" else len(rows)
        )


@pytest.mark.extra("studies")
def test_names_that_matplotlib_hides(tmp_path: Path) -> None:
    for name in ("_a", "_" + "b" * 70):
        for nodes in (1, 2):
            write_run(
                tmp_path / f"runs{nodes}" / name, nodes=nodes, model=name, data="$x"
            )
    report(tmp_path / "runs1", tmp_path / "runs2", "--output", tmp_path / "out")
    assert ">_a<" in re.sub(
        r"\s", "", next((tmp_path / "out").glob("*train-samples*.svg")).read_text()
    )


def test_tokens_and_what_the_model_computes(tmp_path: Path) -> None:
    result = {
        "train_tokens_per_s": 8e4, "train_model_tflop_per_s": 40.0,
        "parameters": 2.5e7, "trained_parameters": 5e5,
    }  # fmt: skip
    write_run(tmp_path / "run", nodes=4, result=result)
    (row,) = csv_of(report(tmp_path, "--format", "csv", "--peak-tflop-per-s", "25"))
    assert float(row["train_tokens_per_s_per_device"]) == 2e4
    assert float(row["train_model_tflop_per_s_per_device"]) == 10.0
    assert float(row["mfu"]) == 0.4
    assert (float(row["parameters_m"]), float(row["trained_parameters_m"])) == (
        25.0,
        0.5,
    )
    (row,) = csv_of(report(tmp_path, "--format", "csv"))
    assert not row.get("mfu")  # nobody said what the device can


def test_settings_of_the_present_folder_do_not_count(tmp_path: Path) -> None:
    """Others may have put a `matplotlibrc` there."""
    pytest.importorskip("matplotlib")
    (tmp_path / "matplotlibrc").write_text("figure.facecolor: red\n")
    code = (
        "import os; from slurmft.plugins.studies.report import plots; "
        "points = [(1, plots.Spread(1, 1, 1, 1))]; "
        "svg, _ = plots.draw(plots.Chart('a', 'b', 'c', 'd', {'e': points})); "
        "print(os.getcwd(), 'ff0000' in svg)"
    )
    command = [sys.executable, "-P", "-c", code]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    printed = process.output(command, PATIENCE_S, cwd=tmp_path, env=environment)
    assert printed == f"{tmp_path} False\n"
