"""Texts made of texts: T5 and BART of random weights, which learn to copy words."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from slurmft.core.errors import SlurmftError, UsageError
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import IGNORED
from slurmft.train.login import configure, inputs
from slurmft.train.login.sources import localize
from slurmft.train.tasks import seq2seq
from slurmft.train.tasks.seq2seq import Task, bleu, scores_of
from tests.conftest import Done, records
from tests.support.models import WORDS, write_copies, write_seq2seq_model, write_splits
from tests.train.test_trainer import EXACT, train


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_copies(
        tmp_path_factory.mktemp("copies") / "data", train=488, validation=35
    )


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seq2seq_model(tmp_path_factory.mktemp("model") / "bart", "bart")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seq2seq_model(tmp_path_factory.mktemp("model") / "t5", "t5")


def task_of(data: Path, model: Path, **given: Any) -> Task:
    config = TrainConfig.resolve(
        task="seq2seq", data=str(data), model=str(model), **given
    )
    found = tasks.get(localize(config))
    assert isinstance(found, Task)
    return found


def run(folder: Path, data: Path, model: Path, *flags: str) -> Done:
    done = train(
        folder, "--task", "seq2seq", "--data", str(data), "--model", str(model), *EXACT,
        *("--learning-rate", "0.003", "--lr-schedule", "constant", "--warmup-steps", "2"),
        *("--max-target-length", "8", "--log-every", "1", *flags),
    )  # fmt: skip
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory, copies: Path, bart: Path) -> Done:
    """Steps of 16 texts; 8 are left for the last of each epoch."""
    return run(
        tmp_path_factory.mktemp("one"),
        copies,
        bart,
        "--batch-size",
        "16",
        "--epochs",
        "3",
    )


def test_copying_is_learnt(learnt: Done) -> None:
    metrics = learnt.result["metrics"]
    assert list(metrics) == ["rougeL", "rouge1", "rouge2", "bleu", "loss"]
    assert metrics.pop("loss") < 0.1
    assert all(value > 90 for value in metrics.values())
    log = (learnt.run.path / "logs/rank-000.log").read_text()
    assert log.count("validation text 1 became") == 3  # evaluations
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = learnt.run.path / "model"
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = model.generate(**tokenizer("word3 joy word9", return_tensors="pt"))
    assert tokenizer.decode(found[0], skip_special_tokens=True) == "word3 joy word9"
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: summarization" in card
    assert "AutoModelForSeq2SeqLM" in card


@pytest.mark.extra("training")
@pytest.mark.parametrize("shard", ["none", "full"])
def test_two_ranks_learn_the_same(
    shard: str, learnt: Done, tmp_path: Path, copies: Path, bart: Path
) -> None:
    """Targets have two to five words: the loss is that of their tokens, not of the texts."""
    flags = ("--epochs", "1", "--batch-size", "4", "--gradient-accumulation-steps", "2")
    done = run(tmp_path, copies, bart, *flags, "--nodes", "2", "--shard", shard)
    steps = zip(records(done.run, "step"), records(learnt.run, "step"), strict=False)
    pairs = [(step["loss"], other["loss"]) for step, other in steps]
    assert len(pairs) == 31
    assert [a for a, _ in pairs[:10]] == pytest.approx(
        [b for _, b in pairs[:10]], abs=1e-5
    )
    first = records(learnt.run, "epoch")[0]["metrics"]
    assert done.result["metrics"] == pytest.approx(first, rel=1e-4)


@pytest.mark.processes
def test_beams_prefix_and_translation_of_t5(
    tmp_path: Path, copies: Path, t5: Path
) -> None:
    """It computes with padding, which a run that asks for none is told."""
    done = run(
        tmp_path, copies, t5, "--preset", "translation", "--num-beams", "2", "--batching", "packed",
        *("--text-column", "text", "--label-column", "summary", "--source-prefix", "word1 : "),
        *("--max-steps", "8", "--batch-size", "16", "--max-length", "6", "--precision", "bf16"),
    )  # fmt: skip
    assert next(iter(done.result["metrics"])) == "bleu"
    losses = [step["loss"] for step in records(done.run, "step")]
    assert losses[-1] < losses[0]
    assert "batches are padded to their longest sample" in done.out + done.err
    assert "are cut to 6 tokens" in done.out + done.err
    saved = json.loads((done.run.path / "model/generation_config.json").read_text())
    assert saved["num_beams"] == 2


def test_sums_give_the_scores_of_the_corpus() -> None:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_bleu

    rng = random.Random(0)
    references = [
        " ".join(rng.choices(WORDS, k=rng.randint(1, 9))) + "." for _ in range(200)
    ]
    texts = [
        " ".join(w for w in each.split() if rng.random() > 0.1) for each in references
    ]
    texts[3] = ""
    rows = np.array([scores_of(*pair) for pair in zip(texts, references, strict=True)])
    assert rows.shape == (200, 13)
    assert bleu(rows) == corpus_bleu(texts, [references]).score
    assert 20 < bleu(rows) < 95
    scorer = RougeScorer(["rouge2"], use_stemmer=True)
    pairs = zip(references, texts, strict=True)
    expected = [scorer.score(*pair)["rouge2"].fmeasure for pair in pairs]
    assert rows[:, 1].tolist() == expected


def test_logits_that_are_nan(copies: Path, bart: Path) -> None:
    task = task_of(copies, bart, max_target_length=4)
    data = task.prepare()
    model = task.model(data).eval()
    with torch.no_grad():
        model.get_encoder().layernorm_embedding.weight.fill_(float("nan"))
    batch = task.batch(
        data.validation.batch(np.arange(35), data.pad_id), data.validation
    )
    with torch.inference_mode():
        predictions = task.evaluate(model, batch, data).predictions.numpy()
    with pytest.raises(SlurmftError, match="NaN for 35 of 35"):
        task.compute(predictions, data)


def test_targets_are_counted_in_tokens(copies: Path, bart: Path) -> None:
    task = task_of(copies, bart)
    data = task.prepare()
    rows = [
        json.loads(line) for line in (copies / "train.jsonl").read_text().splitlines()
    ]
    words = [len(row["summary"].split()) + 1 for row in rows]  # and the end
    assert task.count(data.train, np.array([4, 2])) == words[4] + words[2]
    task.model(data)
    batch = task.batch(data.train.batch(np.array([4, 2]), data.pad_id), data.train)
    assert batch.targets["labels"].shape == (2, max(words[4], words[2]))
    assert batch.inputs["decoder_input_ids"][:, 1:].tolist() == (
        batch.targets["labels"][:, :-1].clamp(min=0).tolist()
    )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "row 2 has no text in the column 'summary'"),
        (7, "row 2 has 7 in the column"),
    ],
)
def test_targets_that_are_wrong(
    target: Any, message: str, tmp_path: Path, bart: Path
) -> None:
    rows = [{"text": "a", "summary": "b"}, {"text": "a", "summary": target}]
    data = write_splits(tmp_path / "data", {"train": rows, "validation": rows})
    config = TrainConfig.resolve(task="seq2seq", data=str(data), model=str(bart))
    with pytest.raises(UsageError, match=message):
        inputs.check(localize(config))


def test_packages_that_are_missing(
    copies: Path, bart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    gone = ("sacrebleu", "rouge_score")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in gone else find(name, *rest),
    )
    flags = {"task": "seq2seq", "data": str(copies), "model": str(bart)}
    with pytest.raises(
        UsageError, match="needs packages that are not installed: rouge-score sacrebleu"
    ) as caught:
        configure.configure(flags)
    assert caught.value.hint
    assert caught.value.hint.endswith("pip install rouge-score sacrebleu")


@pytest.mark.parametrize("kind", ["bart", "M2M100", "BlenderbotSmall"])
def test_loss_is_that_of_the_model(kind: str, tmp_path: Path) -> None:
    """Some models have no method that makes the decoder's inputs: they make them of labels."""
    data = write_copies(tmp_path / "data", 12, 4)
    task = task_of(data, write_seq2seq_model(tmp_path / "model", kind))
    tokens = task.prepare()
    model = task.model(tokens).eval()
    batch = task.batch(tokens.train.batch(np.arange(12), 0), tokens.train)
    with torch.no_grad():
        total, count = task.loss(model(**batch.inputs), batch)
        del batch.inputs["decoder_input_ids"]
        expected = model(**batch.inputs, labels=batch.targets["labels"]).loss
    assert float(total / count) == pytest.approx(float(expected), rel=1e-5)


def test_a_decoder_does_not_see_what_it_is_to_predict() -> None:
    """FSMT's does, where it keeps keys and values: it has no causal mask then."""
    torch.manual_seed(0)
    fsmt = transformers.FSMTConfig(
        src_vocab_size=60, tgt_vocab_size=60, langs=["a", "b"], d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, init_std=0.2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, pad_token_id=1,
    )  # fmt: skip
    model = transformers.FSMTForConditionalGeneration(fsmt).eval()
    seq2seq.keep_no_cache(model)
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        inputs = {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
        expected = model(**inputs, labels=ids).logits
        output = model(**inputs)
    torch.testing.assert_close(output.logits, expected)
    assert output.past_key_values is None


def test_labels_stay_where_a_model_writes_into_them(tmp_path: Path) -> None:
    """As FSMT's function that makes the decoder's inputs: padding would be learnt."""
    data = write_copies(tmp_path / "data", 12, 4)
    task = task_of(data, write_seq2seq_model(tmp_path / "model"))
    tokens = task.prepare()
    task.model(tokens)
    task._decoder_inputs = lambda labels: labels.masked_fill_(labels == IGNORED, 0)
    batch = task.batch(tokens.train.batch(np.arange(12), 0), tokens.train)
    learnt = batch.targets["labels"] != IGNORED
    assert learnt.sum() == task.count(tokens.train, np.arange(12))
    assert not learnt.all()
