"""Tokens kept for the next run: used, damaged, crossed, old."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from slurmft.core.trusted import NotOwnError
from slurmft.node import profiles
from slurmft.train import tasks, token_cache
from slurmft.train.config import TrainConfig
from slurmft.train.token_cache import DamagedError
from tests.conftest import slurmft
from tests.support.damage import damaged
from tests.support.models import write_emotion, write_model

KEY, OLD, USED, NEW = map(token_cache.key_of, ({}, {"a": 1}, {"a": 2}, {"a": 3}))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A folder as a run fills it."""
    made = tmp_path / "run" / "tokens"
    for name in ("train", "tokenizer"):
        (made / name).mkdir(parents=True)
    np.save(made / "train" / "tokens.npy", np.arange(1000))
    (made / "meta.json").write_text("{}")
    (made / "tokenizer" / "vocab.txt").write_text("[PAD]")
    return made


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    made = tmp_path / "next" / "tokens"
    made.mkdir(parents=True)
    return made


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_next_run_gets_the_same(tmp_path: Path, tokens: Path, empty: Path) -> None:
    cache = tmp_path / "cache"
    assert not token_cache.take(cache, KEY, empty)
    token_cache.keep(cache, KEY, tokens)
    assert token_cache.take(cache, KEY, empty)
    assert content(empty) == content(tokens)
    # Arrays take their room once; the tokenizer, which goes into models, is nobody else's.
    assert (empty / "train" / "tokens.npy").stat().st_nlink == 3
    assert (empty / "tokenizer" / "vocab.txt").stat().st_nlink == 1


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o770])
def test_cache_that_is_open_to_others_is_not_used(
    tmp_path: Path, tokens: Path, empty: Path, mode: int
) -> None:
    cache = tmp_path / "cache"
    token_cache.keep(cache, KEY, tokens)
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(mode)
    for use in (token_cache.take, token_cache.keep):
        with pytest.raises(NotOwnError, match="is open to others") as error:
            use(cache, KEY, empty)
        assert (
            error.value.hint
            == f"if nobody else has written there: chmod go-rwx {cache}"
        )
    assert list(token_cache.unused(cache, -1)) == []
    assert list(empty.iterdir()) == []


def test_damaged_sums_never_make_other_tokens(
    tmp_path: Path, tokens: Path, empty: Path
) -> None:
    token_cache.keep(tmp_path / "kept", KEY, tokens)
    sums = (tmp_path / "kept" / KEY / "sums.json").read_bytes()

    for seed in range(60):
        cache = tmp_path / "cache"
        shutil.copytree(tmp_path / "kept", cache)
        text = damaged("sums.json", sums, Random(seed))
        (cache / KEY / "sums.json").write_bytes(text)
        try:
            if token_cache.take(cache, KEY, empty):
                assert content(empty) == content(tokens)
                shutil.rmtree(empty)
                empty.mkdir()
        except DamagedError:
            assert not (cache / KEY).exists()
        assert content(tmp_path / "next") == {}
        shutil.rmtree(cache)


@pytest.mark.parametrize("damage", ["flipped", "cut", "lost", "without sums"])
def test_damaged_entry_is_found_and_made_again(
    tmp_path: Path, tokens: Path, empty: Path, damage: str
) -> None:
    cache = tmp_path / "cache"
    token_cache.keep(cache, KEY, tokens)
    array = cache / KEY / "train" / "tokens.npy"
    whole = array.read_bytes()
    array.unlink()  # not the run's own, which is the same file
    if damage == "flipped":
        array.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "cut":
        array.write_bytes(whole[:-1])
    elif damage == "without sums":
        (cache / KEY / "sums.json").unlink()
    with pytest.raises(DamagedError):
        token_cache.take(cache, KEY, empty)
    assert list(empty.iterdir()) == []
    assert not token_cache.take(cache, KEY, empty)
    token_cache.keep(cache, KEY, tokens)
    assert token_cache.take(cache, KEY, empty)


def test_entry_that_is_removed_while_it_is_taken_is_none(
    tmp_path: Path, tokens: Path, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    token_cache.keep(cache, KEY, tokens)
    place = token_cache._place

    def place_one(source: Path, target: Path) -> None:
        place(source, target)
        token_cache._remove(cache, KEY)

    monkeypatch.setattr(token_cache, "_place", place_one)
    assert not token_cache.take(cache, KEY, empty)
    assert list(empty.iterdir()) == []


def test_runs_at_once(tmp_path: Path, tokens: Path) -> None:
    cache = tmp_path / "cache"

    def use(number: int) -> dict[str, bytes]:
        token_cache.keep(cache, KEY, tokens)
        into = tmp_path / f"run {number}"
        into.mkdir()
        assert token_cache.take(cache, KEY, into)
        return content(into)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(use, range(16)))
    assert all(one == content(tokens) for one in found)
    assert names_in(cache) == {KEY, token_cache._MARK}


def test_entries_that_nobody_uses_go(tmp_path: Path, tokens: Path, empty: Path) -> None:
    cache = tmp_path / "cache"
    for key in (OLD, USED):
        token_cache.keep(cache, key, tokens)
        age(cache / key)
    (cache / f".{KEY}.slurmft-1-ab01").mkdir()
    age(cache / f".{KEY}.slurmft-1-ab01")
    assert token_cache.take(cache, USED, empty)
    token_cache.keep(cache, NEW, tokens)
    assert names_in(cache) == {USED, NEW, token_cache._MARK}


def age(*folders: Path) -> None:
    """Makes nobody have used these for 40 days."""
    long_ago = time.time() - 40 * 86400
    for folder in folders:
        os.utime(folder, (long_ago, long_ago))


@pytest.mark.parametrize("name", ["thesis", KEY])
def test_private_folder_that_others_rename_to_the_cache_is_left_alone(
    tmp_path: Path, tokens: Path, empty: Path, name: str
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / name).mkdir()
    (cache / name / "meta.json").write_text("mine")
    age(cache / name)
    for use in (token_cache.take, token_cache.keep):
        with pytest.raises(NotOwnError, match="slurmft has not made") as error:
            use(cache, NEW, {token_cache.take: empty, token_cache.keep: tokens}[use])
        assert error.value.hint == "move it elsewhere"
    assert list(token_cache.unused(cache, 0)) == []
    assert content(cache) == {f"{name}/meta.json": b"mine"}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("thesis", "meta.json"),
        (KEY, "thesis.tex"),
        (f".{KEY}.slurmft-1-ab01", "thesis.tex"),
        (".thesis.slurmft-1-ab01", "meta.json"),
    ],
)
def test_what_is_no_entry_stays(
    tmp_path: Path, tokens: Path, name: str, file: str
) -> None:
    cache = tmp_path / "cache"
    token_cache.keep(cache, USED, tokens)
    (cache / name).mkdir()
    (cache / name / file).write_text("mine")
    age(cache / name, cache / USED)
    assert [path.name for path, _ in token_cache.unused(cache, 0)] == [USED]
    token_cache.keep(cache, NEW, tokens)
    assert names_in(cache) == {name, NEW, token_cache._MARK}


def test_sources_are_all_that_decides(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    def sources(**given: Any) -> Any:
        values = {
            "task": "emotion",
            "data": str(tiny_data),
            "model": str(tiny_model),
        } | given
        return tasks.get(TrainConfig.resolve(**values)).sources()

    key = token_cache.key_of
    copy = write_model(tmp_path / "elsewhere" / "model")
    assert key(sources()) == key(sources(model=str(copy), seed=7, batch_size=3))
    others = write_emotion(tmp_path / "data", train=20, validation=10)
    for other in ({"max_length": 5}, {"data": str(others)}, {"text_column": "label"}):
        assert key(sources(**other)) != key(sources()), other
    vocabulary = copy / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace("word7", "wort7"))
    assert key(sources(model=str(copy))) != key(sources())
    assert sources(task="synthetic", data=None, model=None) is None


@pytest.mark.extra("caches")
def test_run_takes_the_tokens_of_the_one_before(
    tmp_path: Path, tiny_data: Path, tiny_model: Path
) -> None:
    what = {"task": "emotion", "data": str(tiny_data), "model": str(tiny_model)}
    sources = tasks.get(TrainConfig.resolve(**what)).sources()
    assert sources is not None
    cache = tmp_path / "hf" / f"slurmft-tokens-{os.geteuid()}"
    entry = cache / token_cache.key_of(sources)
    entry.mkdir(parents=True)
    cache.chmod(0o700)
    (cache / token_cache._MARK).touch()
    (entry / "sums.json").write_text('{"lost": {}}')
    flags = [
        "submit",
        "--cluster",
        "local",
        "--follow",
        "--runs-dir",
        str(tmp_path / "runs"),
    ]
    flags += [
        "--max-steps",
        "2",
        *(f"--{name}={value}" for name, value in what.items()),
    ]
    env = {"HF_HOME": str(tmp_path / "hf")}
    first = slurmft(*flags, env=env)
    assert "kept tokens were damaged" in first.out
    assert (entry / "validation" / "tokens.npy").stat().st_nlink == 2
    last = slurmft(*flags, env=env)
    assert f"tokens: those of {entry}" in last.run.rank_log(0).read_text()
    assert first.code == last.code == 0
    assert content(last.run.tokens) == content(first.run.tokens)
    assert last.result["loss"] == first.result["loss"]


def test_main_rank_tokenizes_on_all_cores_of_its_node() -> None:
    granted = sorted(os.sched_getaffinity(0))
    if len(granted) < 2:
        pytest.skip("one core")
    lists = ";".join(map(str, granted))
    try:
        os.sched_setaffinity(0, granted[:1])
        with profiles.all_cores({profiles.CORES: lists}):
            assert sorted(os.sched_getaffinity(0)) == granted
        assert sorted(os.sched_getaffinity(0)) == granted[:1]
        with profiles.all_cores({}):
            assert sorted(os.sched_getaffinity(0)) == granted[:1]
    finally:
        os.sched_setaffinity(0, granted)
