"""Samples, their order, their batches; files that cannot be read."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmft.core.errors import UsageError
from slurmft.core.hub import is_local
from slurmft.train.data.stream import BUCKET_STEPS, bucket_by_length, epoch_order
from slurmft.train.data.tables import TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.cells import label_ids
from slurmft.train.login.rows import read_columns
from slurmft.train.login.sources import find_split
from slurmft.train.tasks.synthetic import LABELS, PRESETS, generate, words_by_label

samples = st.lists(
    st.lists(st.integers(1, 99), min_size=1, max_size=12), min_size=1, max_size=20
)


@given(samples, st.sampled_from([1, 8]), st.randoms())
def test_batch_is_the_samples_padded(
    lists: list[list[int]], multiple: int, rng: object
) -> None:
    table = TokenTable.build(lists, range(len(lists)))
    indices = np.array(rng.choices(range(len(lists)), k=7))  # type: ignore[attr-defined]
    batch = table.batch(indices, pad_id=0, multiple=multiple)
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    assert ids.shape[1] % multiple == 0
    assert ids.shape[1] - max(len(lists[i]) for i in indices) < multiple
    for row, i in enumerate(indices):
        assert ids[row, mask[row] == 1].tolist() == lists[i]
        assert ids[row, mask[row] == 0].sum() == 0
    assert (
        batch.targets["labels"].tolist() == batch.indices.tolist() == indices.tolist()
    )
    assert (batch.tokens, batch.padded_tokens) == (int(mask.sum()), ids.numel())


def test_tables_come_back_from_disk(tmp_path: Path) -> None:
    table = TokenTable.build([[1, 2], [3]], [0, 1])
    TokenData(table, table, ["no", "yés"], 0).save(tmp_path)
    back = TokenData.load(tmp_path)
    assert back.labels == ["no", "yés"]
    assert back.train.tokens.tolist() == [1, 2, 3]
    assert isinstance(back.train.tokens, np.memmap)


def test_epoch_order_is_a_permutation_of_its_own() -> None:
    first, second = epoch_order(1000, 42, 0), epoch_order(1000, 42, 1)
    assert sorted(first) == list(range(1000))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, epoch_order(1000, 42, 0))


@given(st.integers(1, 400), st.integers(1, 9), st.integers(0, 3))
def test_steps_of_similar_lengths(count: int, size: int, epoch: int) -> None:
    lengths = np.random.default_rng(count).integers(1, 100, count)
    order = epoch_order(count, 42, epoch)
    near = bucket_by_length(order, lengths, size, 42, epoch)
    assert sorted(near) == list(range(count))
    assert np.array_equal(near, bucket_by_length(order, lengths, size, 42, epoch))
    window = BUCKET_STEPS * size
    if count <= window:  # no length of another step lies between those of a step
        steps = [lengths[near[i : i + size]] for i in range(0, count, size)]
        steps.sort(key=lambda step: (step.min(), step.max()))
        assert all(a.max() <= b.min() for a, b in itertools.pairwise(steps))


def test_labels_by_number_and_by_name() -> None:
    assert label_ids([0, "joy", 5], LABELS, "f") == [0, 1, 5]


@pytest.mark.parametrize("label", [6, -1, "jo", 1.5, True, None])
def test_labels_out_of_range(label: object) -> None:
    with pytest.raises(UsageError) as error:
        label_ids([0, label], LABELS, "validation.jsonl")
    assert "'validation.jsonl': row 2 has the label" in error.value.message
    assert "0 to 5" in (error.value.hint or "")


ROWS = [{"text": 'é "quoted", with comma', "label": 3}, {"text": "b", "label": 0}]


def write(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if path.name == "train.jsonl":
        path.write_text(lines)
    elif path.name == "train.jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(pa.Table.from_pylist(ROWS), path)
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize(
    "name", ["train.jsonl", "train.jsonl.gz", "train.csv", "train.parquet"]
)
def test_rows_of_every_format(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name)
    assert find_split(tmp_path, "train") == path
    with pytest.raises(UsageError, match="has no column 'sentence'"):
        read_columns(path, ["sentence"])
    labels = ["3", "0"] if path.suffix == ".csv" else [3, 0]
    found = read_columns(path, ["label", "text"])
    assert found == {"label": labels, "text": [row["text"] for row in ROWS]}


@pytest.mark.parametrize(
    "name", ["train.jsonl", "train.csv", "train.jsonl.gz", "train.parquet"]
)
@pytest.mark.parametrize("content", [b"", b"\n", b'{"text": "a', b"\xff\xfe\x00"])
def test_files_that_cannot_be_read(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_columns(path, ["text"])
    assert str(path) in error.value.message


def test_files_as_people_have_them(tmp_path: Path) -> None:
    """A byte order mark, as Excel writes; a blank line at the start."""
    table, lines = tmp_path / "train.csv", tmp_path / "train.jsonl"
    table.write_bytes(b"\xef\xbb\xbftext,label\nx,1\n")
    lines.write_text('\n{"text": "x", "label": 1}\n')
    assert read_columns(table, ["text", "label"]) == {"text": ["x"], "label": ["1"]}
    assert read_columns(lines, ["text", "label"]) == {"text": ["x"], "label": [1]}


def test_split_that_is_not_there_or_there_twice(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no train file"):
        find_split(tmp_path, "train")
    for name in ("train.csv", "train.jsonl"):
        (tmp_path / name).write_text("x")
    with pytest.raises(UsageError, match="more than one train file"):
        find_split(tmp_path, "train")


def test_hub_ids_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_local("distilbert-base-uncased")
    assert not is_local("dair-ai/emotion")
    for name in (
        "/data/emotion",
        "./emotion",
        "~/emotion",
        "a/b/c",
        "my data",
        str(tmp_path),
    ):
        assert is_local(name)
    (tmp_path / "emotion").mkdir()
    assert is_local("emotion")


def test_synthetic_lengths_are_emotions() -> None:
    words = words_by_label(8192, seed=1)
    table = generate(8192, 1, words, np.random.default_rng(0))
    lengths = np.diff(table.offsets)
    assert abs(lengths.mean() - 22.3) < 0.5
    assert abs(lengths.std() - 11.6) < 0.5
    assert lengths.min() >= 4
    assert 80 <= lengths.max() <= 87


def test_paper_preset_has_the_published_sizes() -> None:
    paper = PRESETS["paper"]
    assert paper.train[0] * paper.train[1] == 32_768
    assert paper.validation[0] * paper.validation[1] == 131_072


def test_synthetic_repeats_its_samples() -> None:
    table = generate(10, 3, words_by_label(500, 0), np.random.default_rng(0))
    assert len(table) == 30
    assert len(table.tokens) == table.offsets[-1]
    third = len(table.tokens) // 3
    assert np.array_equal(table.tokens[:third], table.tokens[2 * third :])
    assert np.array_equal(table.labels[:10], table.labels[20:])


def test_balanced_weights_are_scikit_learns() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    from slurmft.train.data.tables import IGNORED, TokenTable
    from slurmft.train.data.token_data import balanced

    labels = [0, 0, 0, 2, 2, 4]
    table = TokenTable.build([[1]] * 6, labels)
    theirs = compute_class_weight("balanced", classes=np.unique(labels), y=labels)
    assert balanced(table, 5)[[0, 2, 4]] == pytest.approx(theirs)
    assert balanced(table, 5)[[1, 3]].tolist() == [1, 1]
    tokens = TokenTable.build([[1, 1, 1], [1]], token_labels=[[0, IGNORED, 1], [0]])
    assert balanced(tokens, 2) == pytest.approx([3 / 4, 3 / 2])


def test_weighted_loss_is_torchs() -> None:
    """The sum over its count is torch's weighted mean, of samples and of tokens."""
    from types import SimpleNamespace

    import torch
    from torch.nn.functional import cross_entropy

    from slurmft.train import tasks
    from slurmft.train.config import TrainConfig
    from slurmft.train.data.tables import IGNORED, TokenTable
    from slurmft.train.data.token_data import balanced

    task = tasks.get(TrainConfig.resolve(task="synthetic", class_weights="balanced"))
    of_samples = TokenTable.build([[1]] * 6, [0, 0, 0, 1, 1, 2])
    of_tokens = TokenTable.build(
        [[1, 1, 1], [1, 1, 1]], token_labels=[[0, IGNORED, 0], [0, 1, 2]]
    )
    for table, chosen in ((of_samples, [0, 1, 3, 5]), (of_tokens, [0, 1])):
        task.class_weights = balanced(table, 3)
        batch = table.batch(np.array(chosen), 0)
        shape = (*batch.targets["labels"].shape, 3)
        logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        total, count = task.loss(SimpleNamespace(logits=logits), batch)
        assert float(count) == pytest.approx(
            task.count(table, np.array(chosen)), rel=1e-9
        )
        weights = torch.from_numpy(task.class_weights)
        expected = cross_entropy(
            logits.view(-1, 3), batch.targets["labels"].view(-1), weights
        )
        assert float(total / count) == pytest.approx(float(expected))
