"""Several sources of training data, mixed by --mix."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest

from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.options import options
from slurmft.train import mix_spec, tasks
from slurmft.train.commands import data as data_command
from slurmft.train.commands import fetch
from slurmft.train.config import TrainConfig
from slurmft.train.data.stream import mixed_rows
from slurmft.train.data.tables import TokenTable
from slurmft.train.data.token_data import balanced
from slurmft.train.login import inputs
from slurmft.train.login.model_card import _data as data_of_card
from slurmft.train.login.predict import _without_training_options
from slurmft.train.login.sources import localize
from slurmft.train.loop.trainer import global_batches
from slurmft.train.mix_spec import MixSpec
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks.embeddings import by_row
from slurmft.train.tasks.pretrained import Pretrained
from tests.conftest import records
from tests.support.models import (
    write_chats,
    write_compared,
    write_copies,
    write_decoder,
    write_documents,
    write_emotion,
    write_many_labels,
    write_pairs,
    write_seq2seq_model,
    write_splits,
    write_squad,
    write_words,
)
from tests.train.test_trainer import EXACT, train


def specs(*texts: str) -> list[MixSpec]:
    return mix_spec.parsed(texts)


def rows_of(labels: str, count: int, word: str = "joy") -> list[dict[str, Any]]:
    """Texts that differ, whose labels are the characters of a text in turn."""
    return [
        {"text": f"{word} word{row % 50} {row}", "label": labels[row % len(labels)]}
        for row in range(count)
    ]


def write(folder: Path, rows: list[dict[str, Any]], *splits: str) -> Path:
    names = splits or ("train", "validation")
    return write_splits(folder, dict.fromkeys(names, rows))


def configured(data: Path, *mix: str, **given: Any) -> TrainConfig:
    values = {"task": "text-classification"} | given
    return localize(TrainConfig.resolve(data=str(data), mix=mix, **values))


def task_of(config: TrainConfig) -> Pretrained:
    task = tasks.get(config)
    assert isinstance(task, Pretrained)
    return task


# --- values of --mix ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("me/texts:0.2", ("me/texts", "0.2", {})),
        ("/a:0.5/b:.25", ("/a:0.5/b", ".25", {})),
        (
            "d:0.1,text_column=a,text_pair_column=b,c",
            ("d", "0.1", {"text_column": "a", "text_pair_column": "b,c"}),
        ),
        (
            "d:0.1,source_prefix=ratio:2, x",
            ("d", "0.1", {"source_prefix": "ratio:2, x"}),
        ),
    ],
)
def test_values_are_read(text: str, expected: tuple[Any, ...]) -> None:
    spec = MixSpec.parse(text)
    assert (spec.name, spec.share_text, spec.settings) == expected
    assert spec.text == text


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (("me/texts",), "does not end with a share"),
        (("me/texts:20%",), "does not end with a share"),
        (("me/texts:0.2,weights",), "'weights' behind the share is no option"),
        (("me/texts:0.2,Text=a",), "'Text=a' behind the share is no option"),
        (("me/texts:0.2,text_column=",), "text_column has no value"),
        (("me/texts:0",), "the share 0 is not between 0 and 1"),
        (("me/texts:1.5",), "the share 1.5 is not between 0 and 1"),
        (("a:0.5", "b:0.5"), "the shares add up to 1, and nothing is left for --data"),
        (("a:0.1", "a:0.2"), "names a source that --mix has already"),
        (("a:0.1,text_column=a,text_column=b",), "has text_column twice"),
        (("a:0.1,epochs=3",), "option of --mix"),
        (("main:0.1",), "is the data of --data, of which each epoch has all rows"),
    ],
)
def test_values_that_cannot_be_right(mix: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as error:
        TrainConfig.resolve(task="text-classification", data="main", mix=mix)
    assert message in error.value.message
    assert error.value.hint


def test_options_of_sources_are_those_that_say_how_rows_are_read() -> None:
    declared = options(TrainConfig)
    names = [name for name, each in declared.items() if each.per_source]
    assert "text_column" in names
    for name in names:
        assert declared[name].decides_tokens
        assert declared[name].value_type is str


def test_tasks_that_read_no_rows_have_no_mix() -> None:
    with pytest.raises(UsageError, match="--mix cannot be used with --task synthetic"):
        TrainConfig.resolve(task="synthetic", mix=("a:0.1",))


def test_texts_are_mixed_into_conversations(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model")
    chats = write_chats(tmp_path / "chats", 12, 5)
    texts = write_documents(tmp_path / "texts", 20, 5)
    given = {"model": str(model), "max_length": 32}
    mix = f"{texts}:0.2,task=causal-lm"
    config = configured(chats, mix, task="sft", **given)
    inputs.check(config)
    data = task_of(config).prepare()
    alone = task_of(configured(chats, task="sft", **given)).prepare()
    blocks = task_of(configured(texts, task="causal-lm", **given)).prepare()
    assert samples_of(data.train) == samples_of(alone.train) + samples_of(blocks.train)
    message = "its task does not go with --task causal-lm"
    with pytest.raises(UsageError, match=message):
        configured(texts, f"{chats}:0.2,task=squad", task="causal-lm", **given)


def test_a_preset_of_a_source_brings_its_columns(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats", 4, 2)
    pairs = [{"prompt": "word1", "completion": "word2"}] * 3
    write(tmp_path / "pairs", pairs, "train")
    mix = f"{tmp_path / 'pairs'}:0.5,preset=completion"
    _, source = configured(chats, mix, task="sft").sources()
    assert (source.text_column, source.label_column) == ("prompt", "completion")


# --- rows of an epoch -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [7, 100, 1000, 99_991])
@pytest.mark.parametrize("shares", [("0.5",), ("0.1", "0.3"), ("0.05", "0.9")])
def test_shares_are_exact_to_a_row(rows: int, shares: tuple[str, ...]) -> None:
    mix = specs(*(f"source{i}:{share}" for i, share in enumerate(shares)))
    counts = mix_spec.draws(rows, mix)
    for spec, count in zip(mix, counts, strict=True):
        # As many as make up the share beside exactly `rows` of --data.
        exact = rows * spec.share / (1 - sum(each.share for each in mix))
        assert abs(count - exact) <= 0.5 or count == 1


def test_no_row_comes_again_before_all_have_come() -> None:
    counts: Counter[int] = Counter()
    for epoch in range(9):
        rows = mixed_rows([10, 7], [10, 4], seed=3, epoch=epoch)
        assert rows[:10].tolist() == list(range(10))
        drawn = rows[10:].tolist()
        assert len(drawn) == 4
        assert all(10 <= row < 17 for row in drawn)
        counts.update(drawn)
        assert max(counts.values()) - min(counts[row] for row in range(10, 17)) <= 1
    # One that is smaller than its share is repeated, each row as often as the others.
    rows = mixed_rows([10, 3], [10, 8], seed=3, epoch=0)
    assert sorted(Counter(rows[10:].tolist()).values()) == [2, 3, 3]


def test_rows_depend_on_seed_and_epoch_alone() -> None:
    def drawn(seed: int, epoch: int) -> list[int]:
        rows = mixed_rows([2, 50, 50], [2, 5, 5], seed, epoch)
        return [int(row) for row in rows[2:]]

    assert drawn(42, 0) == drawn(42, 0)
    assert drawn(42, 0) != drawn(42, 1)
    assert drawn(42, 0) != drawn(43, 0)
    # Two sources of one size do not go in step.
    assert drawn(42, 0)[:5] != [row - 50 for row in drawn(42, 0)[5:]]
    # These rows on every machine, and in every later release.
    assert mixed_rows([2, 9], [2, 3], 42, 1).tolist() == GOLDEN


GOLDEN = [0, 1, 10, 7, 5]


def test_a_resume_goes_on_in_the_same_order() -> None:
    config = TrainConfig.resolve(
        task="text-classification", data="main", mix=("more:0.5",)
    )
    table = TokenTable.build([[1]] * 30, [0] * 30)
    data = SimpleNamespace(source_rows=[20, 10], train=table)
    plan = SimpleNamespace(global_batch_size=8, steps_per_epoch=5)
    setup: Any = SimpleNamespace(
        config=config, data=data, plan=plan, source_counts=[20, 20]
    )
    whole = [batch.tolist() for batch in global_batches(setup, epoch=1)]
    rest = [batch.tolist() for batch in global_batches(setup, epoch=1, done=2)]
    assert whole[2:] == rest
    # Rows at the end that are too few for a step are left out.
    plan.steps_per_epoch = 4
    assert [batch.tolist() for batch in global_batches(setup, epoch=1)] == whole[:4]
    counts = Counter(row for batch in whole for row in batch)
    assert [counts[row] for row in range(30)] == [1] * 20 + [2] * 10


def test_texts_of_rows_stay_together_where_a_row_is_repeated() -> None:
    rows = np.array([4, 1, 4, 0])
    samples = (rows[:, None] * 3 + np.arange(3)).reshape(-1)
    shuffled = samples[np.random.default_rng(0).permutation(len(samples))]
    in_order = shuffled[by_row(shuffled, 3)].reshape(-1, 3)
    assert in_order.tolist() == [[0, 1, 2], [3, 4, 5], [12, 13, 14], [12, 13, 14]]


def test_class_weights_are_those_of_the_mixture() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = [0, 0, 0, 1, 0, 1]
    table = TokenTable.build([[1]] * 6, labels)
    # Four rows of --data, and two that an epoch has three times.
    weights = np.array([1, 1, 1, 1, 3, 3])
    drawn = np.repeat(labels, weights)
    theirs = compute_class_weight("balanced", classes=np.unique(drawn), y=drawn)
    assert balanced(table, 2, weights) == pytest.approx(theirs)


# --- tokens ---------------------------------------------------------------------------------------

Writer = Callable[[Path], Path]

SIZES = {"train": 12, "validation": 5}
CASES: dict[str, tuple[Writer, Writer, dict[str, Any]]] = {
    "text-classification": (
        lambda path: write_pairs(path, ("text", "other"), 3, SIZES),
        lambda path: write_pairs(path, ("text", "other"), 3, {"train": 20}),
        {"text_pair_column": "other"},
    ),
    "text-regression": (
        lambda path: write_pairs(path, ("text", None), 0, SIZES),
        lambda path: write_pairs(path, ("text", None), 0, {"train": 20}),
        {},
    ),
    "multi-label": (
        lambda path: write_many_labels(path, 30, 5),
        lambda path: write_many_labels(path, 20, 1),
        {},
    ),
    "token-classification": (
        lambda path: write_words(path, 30, 5),
        lambda path: write_words(path, 20, 1),
        {},
    ),
    "squad": (
        lambda path: write_squad(path, 12, 5),
        lambda path: write_squad(path, 20, 1),
        {"doc_stride": 8},
    ),
    "causal-lm": (
        lambda path: write_documents(path, 12, 5),
        lambda path: write_documents(path, 20, 1),
        {},
    ),
    "sft": (
        lambda path: write_chats(path, 12, 5),
        lambda path: write_chats(path, 20, 1),
        {},
    ),
    "seq2seq": (
        lambda path: write_copies(path, 12, 5),
        lambda path: write_copies(path, 20, 1),
        {},
    ),
    "embeddings": (
        lambda path: write_compared(path, SIZES),
        lambda path: write_compared(path, {"train": 20}),
        {"preset": "triplets"},
    ),
    "reranker": (
        lambda path: write_compared(path, SIZES),
        lambda path: write_compared(path, {"train": 20}),
        {
            "text_column": "anchor",
            "text_pair_column": "positive",
            "label_column": "score",
        },
    ),
}
"""Task -> what writes its data, what writes another source, and options."""
_MODELS: dict[str, Writer] = {
    "causal-lm": write_decoder,
    "sft": write_decoder,
    "seq2seq": write_seq2seq_model,
}


def test_every_kind_of_rows_is_among_the_cases() -> None:
    forms = {facts.rows for facts in TASKS.values() if facts.splits}
    assert forms == {TASKS[name].rows for name in CASES}


def samples_of(table: TokenTable) -> list[Any]:
    """All that training reads of each sample."""
    targets = None
    if "target_offsets" in table.extra:
        targets = TokenTable(
            table.extra["target_tokens"], table.extra["target_offsets"], table.labels
        )
    samples = []
    for number in range(len(table)):
        places = table.places(np.array([number]))
        sample = [table.tokens[places].tolist(), table.labels[number].tolist()]
        for array in (table.types, table.token_labels):
            sample.append(None if array is None else array[places].tolist())
        if targets:
            sample.append(targets.tokens[targets.places(np.array([number]))].tolist())
        samples.append(sample)
    return samples


@pytest.mark.parametrize("name", CASES)
def test_a_mixture_has_the_samples_of_its_sources(
    name: str, tmp_path: Path, tiny_model: Path
) -> None:
    write_main, write_other, given = CASES[name]
    model = tiny_model
    if name in _MODELS:
        model = _MODELS[name](tmp_path / "model")
    main = write_main(tmp_path / "main")
    other = write_other(tmp_path / "other")
    given = given | {"task": name, "model": str(model), "max_length": 32}
    alone = task_of(configured(main, **given)).prepare()
    mixed = task_of(configured(main, f"{other}:0.5", **given)).prepare()
    # The source as data of its own; a file that it lacks is there for this alone.
    if not list(other.glob("validation*")):
        shutil.copy(other / "train.jsonl", other / "validation.jsonl")
    of_source = task_of(configured(other, **given)).prepare()
    assert of_source.labels == alone.labels == mixed.labels
    expected = samples_of(alone.train) + samples_of(of_source.train)
    assert samples_of(mixed.train) == expected
    assert mixed.source_sizes == (len(alone.train), len(of_source.train))
    assert samples_of(mixed.validation) == samples_of(alone.validation)
    assert len(mixed.source_rows) == 2
    assert mixed.source_rows[1] * mixed.row_size == len(of_source.train)
    # A copy on disk is the same.
    mixed.save(tmp_path / "tokens")
    loaded = type(mixed).load(tmp_path / "tokens")
    assert loaded.source_rows == mixed.source_rows


def named(path: Path, names: list[str], labels: list[int], *splits: str) -> Path:
    """Writes rows whose labels are numbers of classes with names."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    )
    rows = [{"text": f"word{i} {i}", "label": n} for i, n in enumerate(labels)]
    path.mkdir()
    for split in splits or ("train", "validation"):
        dataset = datasets.Dataset.from_list(rows, features=features)
        dataset.to_parquet(str(path / f"{split}.parquet"))
    return path


@pytest.mark.parametrize("form", ["names", "other order"])
def test_classes_of_splits_are_compared_by_name(tmp_path: Path, form: str) -> None:
    """In the lines and the warnings of a submission, whatever numbers the splits have."""
    data = named(tmp_path / "data", ["bad", "good"], [0, 1, 1, 0, 1])
    if form == "names":
        (data / "validation.parquet").unlink()
        rows = [{"text": f"other{n}", "label": n} for n in ("good", "bad", "good")]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (data / "validation.jsonl").write_text(lines)
    else:
        other = named(tmp_path / "other", ["x", "good", "bad"], [2, 1, 1])
        (other / "validation.parquet").replace(data / "validation.parquet")
    config = TrainConfig.resolve(task="text-classification", data=str(data))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*no row of classes.*")
        found = inputs.check(config)
    lines_on_splits = [str(each["what"]) for each in found.values()]
    assert any("'good' 3 (60 %), 'bad' 2 (40 %)" in each for each in lines_on_splits)
    assert any("'good' 2 (67 %), 'bad' 1 (33 %)" in each for each in lines_on_splits)


def test_classes_are_mapped_by_name(tmp_path: Path, tiny_model: Path) -> None:
    main = named(tmp_path / "main", ["bad", "good"], [0, 1, 1, 0])
    other = named(tmp_path / "other", ["good", "so so", "bad"], [0, 2, 2, 0], "train")
    config = configured(main, f"{other}:0.5", model=str(tiny_model))
    inputs.check(config)
    data = task_of(config).prepare()
    assert data.labels == ["bad", "good"]
    # Of the source 0 is "good", 2 is "bad".
    assert data.train.labels.tolist() == [0, 1, 1, 0, 1, 0, 0, 1]
    texts = [{"text": f"joy {i}", "label": name} for i, name in enumerate("ab" * 3)]
    by_text = write(tmp_path / "by text", texts)
    by_number = named(tmp_path / "by number", ["b", "a"], [0, 1], "train")
    config = configured(by_text, f"{by_number}:0.5", model=str(tiny_model))
    inputs.check(config)
    assert task_of(config).prepare().train.labels.tolist() == [0, 1] * 3 + [1, 0]


def test_other_splits_are_mapped_by_name_too(tmp_path: Path, tiny_model: Path) -> None:
    data = named(tmp_path / "data", ["bad", "good"], [0, 1, 1, 0], "train")
    other = named(tmp_path / "other", ["good", "bad"], [0, 1], "validation")
    (other / "validation.parquet").rename(data / "validation.parquet")
    config = configured(data, model=str(tiny_model))
    inputs.check(config)
    assert task_of(config).prepare().validation.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            rows_of("abxyx", 10),
            "has labels that --data does not have: 'x', 'y'",
        ),
        # Numbers are no names of these classes, and no places in their list.
        ([{"text": "joy 1", "label": 0}, {"text": "joy 2", "label": 1}], ": 0, 1"),
    ],
)
def test_labels_that_the_data_lacks_are_refused(
    rows: list[dict[str, Any]], message: str, tmp_path: Path, tiny_model: Path
) -> None:
    main = write(tmp_path / "main", rows_of("ab", 10))
    other = write(tmp_path / "other", rows, "train")
    config = configured(main, f"{other}:0.5", model=str(tiny_model))
    with pytest.raises(UsageError) as error:
        inputs.check(config)
    assert message in error.value.message
    assert f"--mix '{other}:0.5'" in error.value.message
    assert "--data has a, b" in str(error.value.hint)
    # The job, which alone reads data of the hub, refuses them too.
    with pytest.raises(UsageError, match="has the label"):
        task_of(config).prepare()


def test_a_source_may_lack_classes_with_a_warning(tmp_path: Path) -> None:
    main = write(tmp_path / "main", rows_of("ab", 10))
    other = write(tmp_path / "rare", rows_of("b", 5, "love"), "train")
    _, remarks = inputs.look(configured(main, f"{other}:0.3"))
    assert any("has no row of classes that --data has: 'a'" in r for r in remarks)


def test_rows_of_another_kind_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    main = write_compared(tmp_path / "main", SIZES)
    mix = f"{write_compared(tmp_path / 'other', {'train': 20})}:0.5,preset=triplets"
    with pytest.raises(UsageError, match="preset triplets, not pairs"):
        configured(main, mix, task="embeddings")


def test_tables_with_further_arrays_are_not_joined(tmp_path: Path) -> None:
    class Own(Pretrained):
        def model(self, data: Any) -> Any:
            raise NotImplementedError

    table = TokenTable.build([[1]], [0], weights=np.ones(1))
    own = Own(TrainConfig.resolve(task="text-classification"))
    with pytest.raises(UsageError, match="arrays of their own"):
        own.joined([table, table])
    assert own.joined([table]) is table


# --- the login node -------------------------------------------------------------------------------


def test_the_submission_says_what_is_mixed(tmp_path: Path) -> None:
    main = write(tmp_path / "main", rows_of("ab", 80))
    other = write(tmp_path / "other", rows_of("ab", 10, "love"), "train")
    config = configured(main, f"{other}:0.2")
    with pytest.warns(SlurmftWarning) as caught:
        found = inputs.check(config)
    warnings = [str(each.message) for each in caught]
    assert any("is repeated 2 times per epoch: it has 10 rows" in w for w in warnings)
    of_main = found[str(main / "train.jsonl")]["what"]
    assert of_main.startswith("train, 80 % of each epoch, 80 rows: 80 rows, 2 classes")
    of_other = found[str(other / "train.jsonl")]["what"]
    assert of_other.startswith("mix 1, 20 % of each epoch, 20 rows, each 2 times: 10 r")
    program = config.program()
    assert set(program.paths) == {str(main), str(other)}
    # A look at the same data without --mix does not know of it.
    splits, _ = inputs.look(configured(main))
    assert splits[0].part == ""


def test_relative_folders_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = write(tmp_path / "main", rows_of("ab", 10))
    write(tmp_path / "a:b", rows_of("ab", 10), "train")
    monkeypatch.chdir(tmp_path)
    config = configured(main, "a:b:0.5,text_column=text")
    assert config.mix == (f"{tmp_path / 'a:b'}:0.5,text_column=text",)
    assert localize(config).mix == config.mix
    with pytest.raises(UsageError, match=r"--mix '\./absent': no such folder"):
        configured(main, "./absent:0.5")
    with pytest.raises(UsageError, match="is the data of --data"):
        configured(main, "main:0.5")


def test_validation_texts_in_a_source_are_seen(tmp_path: Path) -> None:
    rows = rows_of("ab", 20)
    main = write_splits(
        tmp_path / "main", {"train": rows[:10], "validation": rows[10:]}
    )
    other = write(tmp_path / "other", rows, "train")
    _, remarks = inputs.look(configured(main, f"{other}:0.5"))
    assert any("10 of its 10 texts are in the training data" in r for r in remarks)


def test_sources_of_which_one_is_on_the_hub(tmp_path: Path) -> None:
    local = write(tmp_path / "main", rows_of("ab", 10))
    given = {"task": "text-classification"}
    config = localize(
        TrainConfig.resolve(data="me/texts", mix=(f"{local}:0.5",), **given)
    )
    found = inputs.check(config)
    (what,) = [each["what"] for each in found.values()]
    assert what.startswith("mix 1, 50 % of each epoch: 10 rows")
    assert config.program().needs_hub
    config = configured(local, "me/texts:0.5")
    assert config.program().needs_hub
    assert config.program().paths == (str(local),)


def test_validation_fraction_is_of_the_data_alone(
    tmp_path: Path, tiny_model: Path
) -> None:
    main = write(tmp_path / "main", rows_of("ab", 20), "train")
    other = write(tmp_path / "other", rows_of("ab", 20, "love"))
    config = configured(
        main, f"{other}:0.5", validation_fraction=0.2, model=str(tiny_model)
    )
    inputs.check(config)
    data = task_of(config).prepare()
    assert len(data.validation) == 4
    assert data.source_sizes == (16, 20)


def test_the_data_command_shows_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = write(tmp_path / "main", rows_of("ab", 80))
    other = write(tmp_path / "other", rows_of("ab", 10, "love"), "train")
    data_command.main([str(main), "--mix", f"{other}:0.2"])
    out = capsys.readouterr().out
    assert "20 % of each epoch, 20 rows, each 2 times" in out
    data_command.main([str(main), "--mix", f"{other}:0.2", "--json"])
    shown = json.loads(capsys.readouterr().out)["splits"]
    assert shown["mix 1"]["texts"] == 10
    assert shown["mix 1"]["where"] == str(other / "train.jsonl")
    by_number = named(tmp_path / "1", ["bad", "good"], [0, 1, 1, 1])
    in_other_order = named(tmp_path / "2", ["good", "bad"], [1, 0, 0], "train")
    data_command.main([str(by_number), "--mix", f"{in_other_order}:0.2"])
    out = capsys.readouterr().out
    assert "0 bad   1 (25.0 %)  1 (25.0 %)  1 (33.3 %)\n" in out


def test_fetch_loads_every_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from slurmft.train import prefetch

    main = write(tmp_path / "main", rows_of("ab", 8))
    other = write(tmp_path / "other", rows_of("ab", 6), "train")
    asked = []
    monkeypatch.setattr(fetch, "load", lambda config, offline: asked.append(config))
    monkeypatch.setattr(fetch, "hub_in_reach", lambda: True)
    arguments = ["me/model", str(main), "--task", "text-classification"]
    arguments += ["--mix", f"{other}:0.5", "--mix", "me/texts:0.1"]
    fetch.main(arguments)
    assert [config.mix for config in asked] == [(f"{other}:0.5", "me/texts:0.1")] * 2
    monkeypatch.setattr(prefetch, "_load_model", lambda *_: "a model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    values = {"task": "text-classification", "data": str(main), "mix": [f"{other}:0.5"]}
    capsys.readouterr()
    prefetch.main([json.dumps(values)])
    out = capsys.readouterr().out
    assert f"{main}: train 8 rows, validation 8 rows" in out
    assert f"{other}: train 6 rows" in out


def test_predictions_need_no_source(tmp_path: Path) -> None:
    main = write(tmp_path / "main", rows_of("ab", 10))
    other = write(tmp_path / "other", rows_of("ab", 10), "train")
    config = configured(main, f"{other}:0.5")
    assert _without_training_options(config).mix == ()


def test_the_card_names_sources(tmp_path: Path) -> None:
    main = write(tmp_path / "main", rows_of("ab", 10))
    text = data_of_card(configured(main, "me/texts:0.25"))
    assert text == "main (75 % of each epoch), me/texts (25 % of each epoch)"


def test_kept_tokens_follow_contents_not_shares(
    tmp_path: Path, tiny_model: Path
) -> None:
    main = write(tmp_path / "main", rows_of("ab", 10))
    other = write(tmp_path / "other", rows_of("ab", 10), "train")
    copy = shutil.copytree(other, tmp_path / "copy")

    def sources(*mix: str) -> Any:
        return task_of(configured(main, *mix, model=str(tiny_model))).sources()

    kept = sources(f"{other}:0.5")
    assert kept == sources(f"{copy}:0.2")
    assert kept != sources()
    assert kept != sources(f"{other}:0.5,text_column=label,label_column=text")
    write(tmp_path / "third", rows_of("ab", 11), "train")
    assert kept != sources(f"{tmp_path / 'third'}:0.5")


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_run_trains_on_the_mixture(tmp_path: Path, tiny_model: Path) -> None:
    """Losses are compared in results/benchmarks/references.py."""
    main = write_emotion(tmp_path / "main", train=40, validation=20)
    other = write_emotion(tmp_path / "other", train=14, validation=1)
    shutil.copy(main / "validation.jsonl", main / "test.jsonl")
    flags = [*EXACT, "--task", "emotion", "--model", str(tiny_model)]
    flags += ("--batch-size", "8", "--epochs", "2", "--class-weights", "balanced")
    done = train(tmp_path, *flags, "--data", str(main), "--mix", f"{other}:0.4")
    assert done.code == 0, done.err
    assert done.result["steps"] == 18
    assert done.result["train_samples"] == 2 * 67
    assert done.result["mixture"] == [
        {"source": str(main), "rows": 40, "rows_per_epoch": 40},
        {"source": str(other), "rows": 14, "rows_per_epoch": 27},
    ]
    # Both splits are of --data alone.
    assert done.result["test_samples"] == 20
    (start,) = records(done.run, "start")
    words = f"{str(other)!r}: 40 % of each epoch, 27 rows, each 1.93 times"
    assert words in start["data"]
    assert "is repeated 1.93 times per epoch" in done.err
