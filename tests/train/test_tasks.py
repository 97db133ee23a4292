"""GLUE and texts of one's own: on simulated nodes, with made-up data; and data that is wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from slurmft.core.errors import UsageError
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.data.token_data import TokenData
from slurmft.train.login import inputs
from slurmft.train.login.sources import localize
from slurmft.train.recipes import RECIPES
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks import sequence
from slurmft.train.tasks.base import set_dropout
from slurmft.train.tasks.metrics import SCORES
from slurmft.train.tasks.pretrained import Pretrained
from tests.conftest import Done, assert_two_lines, records
from tests.support.models import (
    write_decoder,
    write_model,
    write_pairs,
    write_splits,
)
from tests.train.test_trainer import EXACT, train

PAIR = ("sentence1", "sentence2")
SHORT = (*EXACT, "--max-steps", "6", "--epochs", "2", "--learning-rate", "0.01")


def test_weights_are_mapped_from_their_file(tmp_path: Path) -> None:
    """The ranks of a node share their pages, and nothing is initialised only to be replaced."""
    folder = write_model(tmp_path / "model")
    config = TrainConfig.resolve(task="emotion", data="unused/data", model=str(folder))
    data: Any = type("Data", (), {"labels": ["a", "b"], "label_type": "str"})
    model = tasks.get(config).model(data)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [
        [int(end, 16) for end in fields[0].split("-")]
        for fields in maps
        if fields[-1] == str(folder / "model.safetensors")
    ]
    weights = dict(model.base_model.named_parameters())
    for name, weight in weights.items():
        address = weight.data_ptr()
        assert any(first <= address < last for first, last in mapped), name


def test_dropout_is_that_of_all_modules(tmp_path: Path) -> None:
    """The configuration of a decoder has none for a head for words, which is made with 0.1."""
    folder = write_decoder(tmp_path / "model")
    config = TrainConfig.resolve(
        task="token-classification", data="unused/data", model=str(folder), dropout=0.3
    )
    data: Any = type("Data", (), {"labels": ["a", "b"], "label_type": "str"})
    model = tasks.get(config).model(data)
    modules = [each for each in model.modules() if isinstance(each, torch.nn.Dropout)]
    assert {module.p for module in modules} == {0.3}


def test_switches_of_dropout_stay() -> None:
    config = transformers.EsmConfig(vocab_size=9, mask_token_id=4, token_dropout=True)
    set_dropout(config, 0.3)
    assert config.token_dropout is True
    assert config.hidden_dropout_prob == 0.3


@pytest.mark.parametrize("kind", ["Bert", "GPT2"])
def test_a_saved_tokenizer_gives_what_the_model_was_trained_on(
    kind: str, tmp_path: Path
) -> None:
    """GPT-2 has no types of tokens: it would look them up among its tokens."""
    model = write_model(tmp_path / "model")
    getattr(transformers, f"{kind}Config")(vocab_size=60).save_pretrained(model)
    data = write_pairs(
        tmp_path / "data", ("text", "other"), 2, {"train": 9, "validation": 9}
    )
    task = tasks.get(
        TrainConfig.resolve(
            task="text-classification", data=str(data), model=str(model),
            text_pair_column="other",
        )
    )  # fmt: skip
    tokens = task.prepare()
    task.save_tokenizer(tmp_path / "saved")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    row = json.loads((data / "train.jsonl").read_text().splitlines()[0])
    given = saved(row["text"], row["other"])
    read = tokens.train.batch(np.array([0]), 0).inputs
    assert given.keys() == read.keys()
    assert all(given[name] == read[name][0].tolist() for name in given)


@pytest.mark.parametrize("kind", ["Funnel", "XLNet"])
@pytest.mark.parametrize(
    "task", ["text-classification", "token-classification", "embeddings", "causal-lm"]
)
def test_types_of_models_without_a_table_of_them(
    task: str, kind: str, tmp_path: Path
) -> None:
    """Funnel and XLNet see whether two tokens are of one text; a special token has a type of its
    own. Their configurations name no number of types. Blocks of texts have none."""
    folder = write_model(tmp_path / "model")
    config_class = getattr(transformers, f"{kind}Config")
    config_class(vocab_size=60, architectures=[f"{kind}Model"]).save_pretrained(folder)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.post_processor = TemplateProcessing(
        single="$A [SEP] [CLS]:2",
        pair="$A [SEP] $B:1 [SEP]:1 [CLS]:2",
        special_tokens=[(name, words.token_to_id(name)) for name in ("[SEP]", "[CLS]")],
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", eos_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    row: dict[str, Any] = {"text": "joy love", "other": "fear", "label": "a"}
    columns = {"text_column": "text", "text_pair_column": "other"}
    expected = tokenizer("joy love", "fear")["token_type_ids"]
    if task == "token-classification":
        row = {"tokens": ["joy", "love"], "tags": ["X", "Y"]}
        columns = {}
        expected = tokenizer("joy love")["token_type_ids"]
    elif task == "embeddings":
        expected = [*tokenizer("joy love")["token_type_ids"], 0, 0, 2]
    elif task == "causal-lm":
        columns = {}
        expected = None
    rows = [row, row | {"label": "b"}] * 2
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    config = TrainConfig.resolve(
        task=task, data=str(data), model=str(folder), **columns
    )
    prepared: Any = tasks.get(config)
    table = prepared.prepare().train
    if expected is None:
        assert table.types is None
    else:
        assert table.types is not None
        assert table.types.tolist() == expected * 4
    prepared.save_tokenizer(tmp_path / "saved")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert ("token_type_ids" in saved.model_input_names) == (expected is not None)


GLUE = [task for task in TASKS if RECIPES[task].get("data") == "nyu-mll/glue"]


def glue_columns(task: str) -> tuple[str, str | None]:
    return RECIPES[task]["text_column"], RECIPES[task].get("text_pair_column")


def glue(folder: Path, task: str, validation: int = 21) -> Path:
    """Made-up data of a task of GLUE."""
    sizes = {split: validation + i for i, split in enumerate(TASKS[task].splits[1:])}
    labels = len(TASKS[task].labels or ())
    return write_pairs(folder, glue_columns(task), labels, {"train": 50} | sizes)


def prepare(task: str, data: Path, model: Path, **given: Any) -> TokenData:
    config = TrainConfig.resolve(task=task, data=str(data), model=str(model), **given)
    return tasks.get(localize(config)).prepare()


def run(
    tmp_path: Path, nodes: int, task: str, data: Path, model: Path, *flags: str
) -> Done:
    sizes = (
        "--nodes",
        str(nodes),
        "--batch-size",
        str(8 // nodes),
        "--eval-batch-size",
        "8",
    )
    source = ("--task", task, "--data", str(data), "--model", str(model))
    done = train(tmp_path, *source, *SHORT, *sizes, *flags)
    assert done.code == 0, done.err
    return done


def test_every_task_of_glue_is_prepared(tmp_path: Path, tiny_model: Path) -> None:
    for task in GLUE:
        data = prepare(task, glue(tmp_path / task, task), tiny_model)
        assert data.labels == list(TASKS[task].labels or ())
        assert len(data.train) == 50
        assert data.train.labels.dtype == (np.int64 if data.labels else np.float64)
        assert (data.train.types is None) == (glue_columns(task)[1] is None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing by threads, and lose much where cores are shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_task_of_glue_is_trained(
    tmp_path: Path, tiny_model: Path, one_thread: None
) -> None:
    """Two steps and an evaluation of each, in this process; numbers in bf16 as well."""
    import torch

    for name, in_bf16 in [*((task, False) for task in GLUE), ("stsb", True)]:
        folder = glue(tmp_path / f"{name} {in_bf16}", name)
        task = tasks.get(
            TrainConfig.resolve(task=name, data=str(folder), model=str(tiny_model))
        )
        data = task.prepare()
        torch.manual_seed(0)
        model = task.model(data).eval()  # without dropout, the loss falls
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = data.train.batch(np.arange(16), data.pad_id, multiple=8)
        losses = []
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            for _ in range(3):
                loss, count = task.loss(model(**batch.inputs), batch)
                torch.autograd.backward(loss / count)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            everything = np.arange(len(data.validation))
            batch = data.validation.batch(everything, data.pad_id)
            with torch.inference_mode():
                predictions = task.evaluate(model, batch, data).predictions.numpy()
        assert count == 16
        assert losses[2] < losses[0], name
        assert predictions.dtype == task.prediction_dtype
        found = task.compute(predictions, data)
        assert tuple(found) == task.metric_names
        assert np.isfinite(list(found.values())).all(), name


@pytest.mark.parametrize(("task", "before"), [("stsb", "mnli"), ("mnli", "stsb")])
def test_model_that_was_tuned_for_something_else(
    task: str, before: str, tmp_path: Path, tiny_model: Path
) -> None:
    """Its configuration says for which labels; small tasks often begin with a model of MNLI."""
    folders = {name: glue(tmp_path / name, name) for name in (task, before)}

    def tuned(name: str, model: Path) -> tuple[Any, Any]:
        made = tasks.get(
            TrainConfig.resolve(task=name, data=str(folders[name]), model=str(model))
        )
        data = made.prepare()
        found = made.model(data)
        batch = data.train.batch(np.arange(8), data.pad_id)
        loss, _ = made.loss(found(**batch.inputs), batch)
        return found, loss

    model, _ = tuned(before, tiny_model)
    shutil.copytree(tiny_model, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    model, loss = tuned(task, tmp_path / "model")
    assert loss.isfinite()
    assert model.config.num_labels == (len(TASKS[task].labels or ()) or 1)


@pytest.mark.processes
def test_metrics_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Of MNLI: its two validations are one table for the ranks, and two for the metrics."""
    data = glue(tmp_path / "data", "mnli")
    two, one = (run(tmp_path, nodes, "mnli", data, tiny_model) for nodes in (2, 1))
    for done in (one, two):
        assert list(done.result["metrics"]) == [
            "accuracy_matched",
            "accuracy_mismatched",
            "loss",
        ]
    for step, other in zip(
        records(one.run, "step"), records(two.run, "step"), strict=True
    ):
        assert step["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert two.result["metrics"] == pytest.approx(one.result["metrics"], rel=1e-4)


@pytest.mark.processes
def test_numbers(tmp_path: Path, tiny_model: Path) -> None:
    """One output, learnt by its squared error; correlations of what the saved model says, on one
    rank and on two."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    data = glue(tmp_path / "data", "stsb")
    one = run(tmp_path, 1, "stsb", data, tiny_model)
    done = run(tmp_path, 2, "stsb", data, tiny_model)
    # Correlations of numbers that hardly differ make much of their last bits.
    assert one.result["metrics"] == pytest.approx(done.result["metrics"], abs=1e-3)
    for step, other in zip(
        records(done.run, "step"), records(one.run, "step"), strict=True
    ):
        assert step["loss"] == pytest.approx(other["loss"], abs=1e-5)
    model = AutoModelForSequenceClassification.from_pretrained(done.run.model).eval()
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(done.run.model)
    rows = [
        json.loads(line)
        for line in (data / "validation.jsonl").read_text().splitlines()
    ]
    with torch.inference_mode():
        found = [
            model(
                **tokenizer(r["sentence1"], r["sentence2"], return_tensors="pt")
            ).logits.item()
            for r in rows
        ]
    labels = np.array([row["label"] for row in rows])
    metrics = done.result["metrics"]
    assert metrics.pop("loss") == pytest.approx(
        np.square(found - labels).mean(), abs=1e-3
    )
    for name, value in metrics.items():
        assert value == pytest.approx(SCORES[name](np.array(found), labels), abs=1e-3)


def test_both_validations_of_mnli(tmp_path: Path, tiny_model: Path) -> None:
    """Each has its own metric, from its own samples."""
    folder = glue(tmp_path / "data", "mnli")
    config = TrainConfig.resolve(task="mnli", data=str(folder), model=str(tiny_model))
    task = tasks.get(config)
    data = task.prepare()
    assert data.sizes == (21, 22)
    right = data.validation.labels.copy()
    right[:7] = (right[:7] + 1) % 3
    right[21:32] = (right[21:32] + 1) % 3
    assert task.compute(right, data) == {
        "accuracy_matched": 14 / 21,
        "accuracy_mismatched": 11 / 22,
    }


def test_pairs_are_tokenized_as_the_model_wants_them(tmp_path: Path) -> None:
    """Token types where the tokenizer gives them and the model takes them; both texts cut."""
    bert = write_model(tmp_path / "bert")
    folder = write_splits(
        tmp_path / "data",
        {s: [{"sentence1": "joy word1", "sentence2": "word2", "label": i} for i in (0, 1)]
         for s in ("train", "validation")},
    )  # fmt: skip
    data = prepare("mrpc", folder, bert)
    batch = data.train.batch(np.array([0, 1]), data.pad_id, multiple=8).inputs
    assert batch["input_ids"][0].tolist() == [2, 6, 12, 3, 13, 3, 0, 0]
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    (tmp_path / "saved").mkdir()
    data.save(tmp_path / "saved")
    back = TokenData.load(tmp_path / "saved")
    assert back.train.types is not None
    assert back.train.types.tolist() == [0, 0, 0, 0, 1, 1] * 2
    cut = prepare("mrpc", folder, bert, max_length=5)
    assert cut.train.tokens[:5].tolist() == [2, 6, 3, 13, 3]

    facts = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps(facts | {"type_vocab_size": 1}))
    assert prepare("mrpc", folder, bert).train.types is None


@pytest.mark.processes
def test_texts_of_ones_own(tmp_path: Path, tiny_model: Path) -> None:
    """Label names are those of the data, and the model that is saved has them."""
    rows = [
        {"say": f"{w} word{i}", "to": "word1", "mood": w}
        for i in range(30) for w in ("joy", "fear", "anger")
    ]  # fmt: skip
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows[:31]})
    flags = (
        "--text-column",
        "say",
        "--text-pair-column",
        "to",
        "--label-column",
        "mood",
    )
    done = run(tmp_path, 2, "text-classification", data, tiny_model, *flags)
    assert list(done.result["metrics"]) == ["accuracy", "f1_macro", "loss"]
    labels = json.loads((done.run.model / "config.json").read_text())["id2label"]
    assert labels == {"0": "anger", "1": "fear", "2": "joy"}


def test_labels_that_are_numbers(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"text": "joy", "label": stars} for stars in (5, 1, 10, 1)]
    folder = write_splits(tmp_path / "data", {"train": rows, "validation": rows[:1]})
    data = prepare("text-classification", folder, tiny_model)
    assert data.labels == ["1", "5", "10"]
    assert data.train.labels.tolist() == [1, 0, 2, 0]


GOOD = {"sentence1": "joy", "sentence2": "fear", "label": 1}
OWN = {"text": "joy", "label": "a"}


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("mrpc", [GOOD | {"label": 0.5}], "row 1 has the label 0.5"),
        (
            "mrpc",
            [GOOD, GOOD | {"label": 2}],
            "labels are 0 to 1, or not_equivalent, equivalent",
        ),
        ("mrpc", [GOOD | {"label": [1]}], "row 1 has the label [1]"),
        ("mrpc", [GOOD | {"sentence2": 3}], "row 1 has 3 in the column"),
        ("mrpc", [{"sentence1": "joy", "label": 1}], "has no column 'sentence2'"),
        ("stsb", [GOOD, GOOD | {"label": "four"}], "row 2 has the label 'four'"),
        ("text-classification", [OWN, OWN | {"label": 1.5}], "has the label"),
        (
            "text-classification",
            [{"text": "x", "label": 0.5}],
            "row 1 has the label 0.5",
        ),
        ("text-classification", [OWN, OWN], "the one label 'a'"),
        (
            "text-classification",
            [OWN, OWN | {"label": "b"}],
            "another label in every row",
        ),
    ],
)
def test_rows_that_are_wrong(
    task: str,
    rows: list[dict[str, Any]],
    message: str,
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    with pytest.raises(UsageError) as error:
        prepare(task, data, tiny_model)
    assert message in str(error.value) or "cannot read" in str(error.value)


ANSWER = {"id": "q1", "question": "joy", "context": "fear joy"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("task", "row", "flags", "fact"),
    [
        (
            "mrpc",
            GOOD,
            ["--profile", "gpu"],
            "looked at CUDA_VISIBLE_DEVICES and its like, /dev/nvidia*",
        ),
        ("mrpc", GOOD | {"label": 0.5}, [], "row 1 has the label 0.5"),
        (
            "squad",
            ANSWER | {"answers": {"text": ["joy"], "answer_start": [99]}},
            [],
            "question 'q1' has the answer 'joy', which is not at character 99",
        ),
    ],
)
def test_mistakes_that_show_in_the_job(
    task: str,
    row: dict[str, Any],
    flags: list[str],
    fact: str,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """End it before it trains, with the two lines that others get on the login node; before them a
    warning may stand, that one text is in both splits."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    data = write_splits(tmp_path / "data", {"train": [row] * 64, "validation": [row]})
    source = ("--task", task, "--data", str(data), "--model", str(tiny_model))
    done = train(tmp_path, *source, *flags)
    told = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    assert_two_lines(dataclasses.replace(done, err="\n".join(told)), fact)


def test_label_that_training_did_not_have(tmp_path: Path, tiny_model: Path) -> None:
    rows = [OWN, OWN, OWN | {"label": "b"}]
    data = write_splits(
        tmp_path / "data", {"train": rows, "validation": [OWN | {"label": "c"}]}
    )
    with pytest.raises(
        UsageError, match=r"row 1 has the label 'c'\nhint: labels are a, b"
    ):
        prepare("text-classification", data, tiny_model)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda data: {"task": "mprc"}, "did you mean mrpc?"),
        (lambda data: {"task": "sst-2"}, "did you mean sst2?"),
        (
            lambda data: {
                "task": "mnli",
                "data": data,
                "text_column": "text",
                "text_pair_column": "text",
            },
            "has no validation_matched file",
        ),
        (lambda data: {"task": "text-classification"}, "needs data of your own"),
        (lambda data: {"task": "rte", "data": data}, "has no column 'sentence1'"),
    ],
)
def test_requests_that_cannot_be_right(
    given: Callable[[str], dict[str, str]], message: str, tmp_path: Path
) -> None:
    data = write_splits(tmp_path / "data", {"train": [OWN], "validation": [OWN]})
    with pytest.raises(UsageError) as error:
        inputs.check(localize(TrainConfig.resolve(**given(str(data)))))
    assert message in str(error.value)


def test_no_such_split_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    message = 'Unknown split "validation". Should be one of [train].'

    def refuse(*arguments: object, **named: object) -> None:
        raise ValueError(message)

    monkeypatch.setattr("datasets.load_dataset", refuse)
    task = tasks.get(TrainConfig.resolve(task="mrpc"))
    assert isinstance(task, Pretrained)
    with pytest.raises(
        UsageError, match="'nyu-mll/glue' has no validation split"
    ) as error:
        task.rows("validation")
    assert str(error.value.hint) == (
        "--validation-fraction 0.1 takes it from the training data; or "
        f"{message.rstrip('.')}"
    )


def test_hub_names_of_subsets_and_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLUE is one data set with many parts; a column of classes knows their names."""
    import datasets

    asked = []

    def load(*arguments: object, split: str) -> Any:
        asked.append((*arguments, split))
        features = datasets.Features(
            {
                "text": datasets.Value("string"),
                "label": datasets.ClassLabel(names=["z", "a"]),
            }
        )
        return datasets.Dataset.from_dict(
            {"text": ["x", "y"], "label": [0, 1]}, features
        )

    monkeypatch.setattr("datasets.load_dataset", load)
    for given in ({"task": "rte"}, {"task": "rte", "data": "my/rte"}):
        task = tasks.get(TrainConfig.resolve(**given))
        assert isinstance(task, Pretrained)
        task.rows("train")
    assert asked == [("nyu-mll/glue", "rte", "train"), ("my/rte", None, "train")]
    own = tasks.get(TrainConfig.resolve(task="text-classification", data="my/texts"))
    assert isinstance(own, sequence.Task)
    rows = own.rows("train")
    assert own.label_names(rows) == ["z", "a"]
    assert own.labels(rows, ["z", "a"]) == [0, 1]


def test_no_validation_split(tmp_path: Path) -> None:
    data = write_splits(tmp_path / "data", {"train": [GOOD]})
    with pytest.raises(UsageError, match="has no validation file"):
        localize(TrainConfig.resolve(task="mrpc", data=str(data)))
