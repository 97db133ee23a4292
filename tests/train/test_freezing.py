"""--freeze: what trains, what is in checkpoints, what is refused; as Trainer does it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    Trainer,
    TrainingArguments,
)

from slurmft.core.errors import UsageError
from slurmft.train.config import TrainConfig
from slurmft.train.engine import fused_layers, packing
from slurmft.train.engine.freezing import check_same, freeze, trained
from slurmft.train.engine.model_flops import ModelFlops
from slurmft.train.login import sources
from slurmft.train.login.sources import localize
from tests.conftest import Done, Following, records, slurmft
from tests.support.by_trainer import classifier, samples, training_rows
from tests.support.models import write_model
from tests.support.packed_models import LENGTHS, announced, make
from tests.train.test_resume import await_resumes, losses, one_rank
from tests.train.test_trainer import emotion

HEAD = "ForSequenceClassification"


def frozen(model: Any) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def below(model: Any, *modules: str) -> set[str]:
    names = {name for name, _ in model.named_parameters()}
    return {name for name in names if name.startswith(modules)}


@pytest.mark.parametrize(
    ("name", "head", "what", "expected"),
    [
        ("Bert", HEAD, "embeddings", ("bert.embeddings.",)),
        ("Bert", HEAD, "layers:1", ("bert.embeddings.", "bert.encoder.layer.0.")),
        ("Bert", HEAD, "base", ("bert.",)),
        (
            "DistilBert",
            "ForTokenClassification",
            "layers:1",
            ("distilbert.embeddings.", "distilbert.transformer.layer.0."),
        ),
        ("GPT2", "LMHeadModel", "embeddings", ("transformer.w",)),
        ("MPNet", HEAD, "layers:1", ("mpnet.embeddings.", "mpnet.encoder.layer.0.")),
    ],
)
def test_what_is_frozen(
    name: str, head: str, what: str, expected: tuple[str, ...]
) -> None:
    model = make(name, head)
    assert freeze(model, what) == {"embeddings": 0, "layers:1": 1, "base": 2}[what]
    assert frozen(model) == below(model, *expected)
    assert trained(model).keys() >= below(model, "") - frozen(model)
    assert not trained(model).keys() & frozen(model)


@pytest.mark.parametrize("kind", ["Bart", "T5"])
def test_an_encoder_comes_before_its_decoder(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    sizes = {
        "Bart": {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2},
        "T5": {"d_model": 16, "num_layers": 2, "num_decoder_layers": 2, "d_ff": 16},
    }
    config = AutoConfig.for_model(kind.lower(), vocab_size=64, **sizes[kind])
    model = AutoModelForSeq2SeqLM.from_config(config)
    assert freeze(model, "layers:3") == 3
    layers = "layers" if kind == "Bart" else "block"
    prefix = "model." if kind == "Bart" else ""
    whole = [f"{prefix}encoder.{layers}.{i}." for i in (0, 1)]
    whole.append(f"{prefix}decoder.{layers}.0.")
    assert frozen(model) >= below(model, *whole)
    assert not frozen(model) & below(model, f"{prefix}decoder.{layers}.1.")
    assert not model.get_input_embeddings().weight.requires_grad


def test_weights_that_the_source_lacks_train() -> None:
    model = make("Bert", HEAD)
    model.missing_keys = ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
    freeze(model, "base")
    assert below(model, "") - frozen(model) == below(
        model, "bert.pooler.", "classifier."
    )


def test_models_that_cannot_be_frozen_so() -> None:
    with pytest.raises(UsageError, match="BertForSequenceClassification has 2 layers"):
        freeze(make("Bert", HEAD), "layers:3")
    with pytest.raises(UsageError, match="leaves nothing of GPT2LMHeadModel to train"):
        freeze(make("GPT2", "LMHeadModel"), "base")
    model = make("Bert", "Model")
    model.pooler = None
    # Its two layers are all that there is: the cure is none of them.
    with pytest.raises(
        UsageError, match="layers:2 leaves nothing of BertModel"
    ) as error:
        freeze(model, "layers:2")
    assert error.value.hint == "freeze fewer layers, as --freeze layers:1"
    with pytest.raises(UsageError, match="of BertModel to train: it has no head"):
        freeze(make("Bert", "Model"), "base")
    with pytest.raises(UsageError, match="does not tell its layers apart"):
        freeze(make("XLM", HEAD), "layers:1")


@pytest.mark.parametrize(
    ("task", "modules", "tied", "reason"),
    [
        ("embeddings", False, False, "it has no head"),
        ("embeddings", True, False, None),
        ("sft", False, True, "its head is its table of embeddings"),
        ("sft", False, False, None),
        ("text-classification", False, True, None),
    ],
)
def test_no_head_is_told_at_submission(
    task: str, modules: bool, tied: bool, reason: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    if modules:
        (tmp_path / "modules.json").write_text("[]")
    config = TrainConfig(
        task=task, data="d", model=str(tmp_path), freeze="base", precision="fp32"
    )
    if reason is None:
        sources._check_has_head(config, tmp_path)
        return
    with pytest.raises(UsageError) as error:
        sources._check_has_head(config, tmp_path)
    assert error.value.message == (
        f"--freeze base leaves nothing of --model {str(tmp_path)!r} to train: {reason}"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"freeze": "layers:0"}, "--freeze layers:0 freezes no layer"),
        ({"freeze": "head"}, "--freeze"),
        ({"freeze": "base", "lora": 4}, "--freeze base cannot be used with --lora 4"),
        (
            {"freeze": "base", "task": "synthetic"},
            "--freeze base needs a model, and --task synthetic makes up its own",
        ),
    ],
)
def test_options_that_cannot_be_right(given: dict[str, Any], message: str) -> None:
    values = {"task": "emotion", "model": "m", "data": "d"} | given
    if values["task"] == "synthetic":
        values |= {"model": None, "data": None}
    with pytest.raises(UsageError, match=message):
        TrainConfig.resolve(**values)


def test_layers_that_a_model_lacks_are_told_at_submission(
    tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    given = {"task": "emotion", "model": str(tiny_model), "data": str(tiny_data)}
    localize(TrainConfig.resolve(**given, freeze="layers:1"))
    with pytest.raises(UsageError, match="layers:9: the model has 1 layers"):
        localize(TrainConfig.resolve(**given, freeze="layers:9"))


def test_checkpoints_of_other_weights() -> None:
    facts = {"freeze": "base", "base_sha256": "a"}
    check_same("c", facts, dict(facts))
    with pytest.raises(UsageError, match="the model has changed since c"):
        check_same("c", facts, facts | {"base_sha256": "b"})
    with pytest.raises(UsageError, match="c has freeze=base, this run embeddings"):
        check_same("c", facts, facts | {"freeze": "embeddings"})
    with pytest.raises(UsageError, match="c has freeze=None, this run base"):
        check_same("c", None, facts)


def test_frozen_layers_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused layers compute no gradients of what is below all that trains; others are the same."""
    calls: list[int] = []
    backward = fused_layers._Fused.backward

    def counted(ctx: Any, *gradients: Any) -> Any:
        calls.append(1)
        return backward(ctx, *gradients)

    monkeypatch.setattr(fused_layers._Fused, "backward", counted)
    gradients = []
    for what, layers in ((None, 2), ("layers:1", 1)):
        model = make("Bert", HEAD)
        if what:
            freeze(model, what)
        packed = packing.pack(model)
        assert isinstance(packed, packing.Packing)
        assert packed.layers
        calls.clear()
        labels = torch.arange(len(LENGTHS)) % 3
        model(**announced(packed, LENGTHS).inputs, labels=labels).loss.backward()
        assert len(calls) == layers
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[1].items():
        if gradient is not None:
            torch.testing.assert_close(gradient, gradients[0][name])
    assert ModelFlops.of(make("Bert", HEAD), 1).per_pair < (
        ModelFlops.of(make("Bert", HEAD)).per_pair
    )


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("base") / "model")
    config = BertConfig.from_pretrained(folder, num_hidden_layers=2)
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


FLAGS = (
    *("--freeze", "layers:1", "--learning-rate", "0.003", "--precision", "fp32"),
    *("--lr-schedule", "constant", "--warmup-ratio", "0", "--dropout", "0"),
    # With the usual one a gradient of nearly nothing moves a weight as far as any other.
    *("--adam-epsilon", "0.001", "--cluster", "local", "--log-every", "1"),
)


def submit(tmp_path: Path, *arguments: str) -> Done:
    done = slurmft(
        *("submit", "--follow", "--runs-dir", str(tmp_path), *FLAGS, *arguments),
        imported=True,
    )
    assert done.code == 0, done.err
    return done


def by_trainer(model: Path, data: Path, folder: Path) -> Any:
    """Trains three steps of all samples, with the head that the run begins with."""
    trains = classifier(model)
    trains.bert.embeddings.requires_grad_(False)
    trains.bert.encoder.layer[0].requires_grad_(False)
    rows = training_rows(data)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=len(rows),
        num_train_epochs=3,
        learning_rate=0.003,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        adam_epsilon=0.001,
        max_grad_norm=1.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(
        trains,
        arguments,
        train_dataset=samples(model, rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    ).train()
    return trains


@pytest.mark.processes
@pytest.mark.parametrize(
    "more",
    [
        ("--nodes", "2"),
        pytest.param(
            ("--nodes", "2", "--shard", "full"), marks=pytest.mark.extra("training")
        ),
    ],
)
def test_updates_are_those_of_trainer(
    more: tuple[str, ...], tmp_path: Path, two_layers: Path, tiny_data: Path
) -> None:
    done = submit(
        tmp_path,
        *(*emotion(tiny_data, two_layers), *more),
        # Of 203 samples.
        *("--batch-size", "102", "--epochs", "3", "--save", "last"),
    )
    assert "parameters train" in done.out
    model = by_trainer(two_layers, tiny_data, tmp_path / "trainer")
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    assert done.result["trained_parameters"] == sum(sizes) < done.result["parameters"]
    saved = load_file(done.run.model / "model.safetensors")
    base = load_file(two_layers / "model.safetensors")
    differences = {}
    for name, weight in model.named_parameters():
        ours = torch.from_numpy(saved[name])
        differences[name] = float((ours - weight.detach()).abs().max())
        if not weight.requires_grad:
            before = torch.from_numpy(base[name.removeprefix("bert.")])
            assert torch.equal(ours, before)
    assert max(differences.values()) < 5e-6, differences


@pytest.mark.extra("training")
def test_stopped_runs_end_as_if_they_had_not_been(
    tmp_path: Path, tiny_data: Path, two_layers: Path
) -> None:
    """To the last bit; checkpoints hold what trains alone. Of another base they do not go on."""
    sizes = ("--batch-size", "4", "--epochs", "4", "--nodes", "2")
    arguments = (*emotion(tiny_data, two_layers), *sizes)
    whole = submit(tmp_path / "whole", *arguments)
    job = Following(
        *(*FLAGS, *arguments), "--runs-dir", str(tmp_path / "cut"), imported=True
    )
    job.at_step(9)
    os.kill(one_rank(job.run), signal.SIGUSR2)
    await_resumes(job.run, 1)
    code, text = job.end()
    assert code == 0, text
    assert len(records(job.run, "resume")) == 1
    assert losses(job.run) == losses(whole.run)
    weights = [load_file(r.model / "model.safetensors") for r in (job.run, whole.run)]
    for name, tensor in weights[1].items():
        assert (weights[0][name] == tensor).all(), name
    best = whole.run.checkpoints / whole.run.checkpoint_names()[-1]
    saved = load_file(best / "model.safetensors")
    assert sum(t.size for t in saved.values()) == whole.result["trained_parameters"]
