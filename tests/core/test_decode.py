"""Dataclasses from JSON: what fits is read, what does not is damaged."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest

from slurmft.core import run_files, run_records
from slurmft.core.decode import (
    DecodeError,
    decode,
    decode_leniently,
    decode_or_none,
    read,
)
from slurmft.core.errors import SlurmftError
from slurmft.core.files import write_json
from slurmft.core.run_files import Attempt, Failure, State, Transition


@dataclass
class Inner:
    name: str
    size: int | None = None


@dataclass
class Outer:
    text: str
    count: int = 0
    ratio: float = 0.0
    is_sure: bool = False
    code: Annotated[int, range(256)] = 0
    inner: Inner | None = None
    names: list[str] = field(default_factory=list)
    pair: tuple[int, ...] = ()
    sizes: dict[str, float | None] = field(default_factory=dict)
    parts: list[Inner] = field(default_factory=list)
    anything: Any = None


WHOLE = {
    "text": "a", "count": 3, "ratio": 1, "is_sure": True, "code": 255,
    "inner": {"name": "b", "size": None}, "names": ["c"], "pair": [1, 2],
    "sizes": {"d": 1.5, "e": None}, "parts": [{"name": "f", "size": 2}], "anything": [{}],
}  # fmt: skip


def test_every_kind() -> None:
    found = decode(WHOLE | {"unknown": 1}, Outer)
    assert found.inner == Inner("b")
    assert found.parts == [Inner("f", 2)]
    assert found.pair == (1, 2)
    assert json.loads(json.dumps(asdict(found))) == WHOLE
    assert decode({"text": "a"}, Outer) == Outer("a")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", None), ("text", 1), ("count", 1.5), ("count", True), ("count", 2**63),
        ("ratio", "1"), ("ratio", float("nan")), ("ratio", float("inf")), ("ratio", None),
        ("is_sure", 1), ("code", 256), ("code", -1), ("inner", {}), ("inner", []),
        ("names", "c"), ("names", [1]), ("pair", [1, "2"]), ("sizes", {"d": "1"}), ("sizes", []),
        ("parts", [{"name": "f", "size": "2"}]), ("parts", [None]),
    ],
)  # fmt: skip
def test_wrong_field(name: str, value: Any) -> None:
    with pytest.raises(DecodeError):
        decode(WHOLE | {name: value}, Outer)
    lenient = (
        decode_leniently(WHOLE | {name: value}, Outer) if name != "text" else Outer("a")
    )
    assert getattr(lenient, name) == getattr(Outer("a"), name)


def test_measurements() -> None:
    """One of a training that diverges hides no other one."""
    result = {"metrics": {"f1": 0.5, "perplexity": 1e25, "mse": 1e300, "n": 10**400}}
    result["metrics"]["loss"] = float("nan")
    metrics = decode_leniently(result, run_files.Result).metrics
    assert metrics == {
        "f1": 0.5,
        "perplexity": 1e25,
        "mse": None,
        "n": None,
        "loss": None,
    }
    step = decode({"event": "step", "step": 1, "loss": 1e25}, run_records.Step)
    assert step.loss == 1e25
    others: tuple[Any, ...] = ("1", True, [])
    for other in others:
        damaged = {"metrics": {"f1": other}}
        assert decode_leniently(damaged, run_files.Result).metrics is None


def test_missing_field() -> None:
    with pytest.raises(DecodeError, match="text missing"):
        decode({}, Outer)
    assert decode_or_none([], Outer) is None


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert read(path, Inner) is None
    for text in ("", "{", "[]", "nul", '{"name": 1}', "[" * 5000, "\udcff"):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert read(path, Inner) is None
    write_json(path, Inner("a", 1))
    assert read(path, Inner) == Inner("a", 1)
    write_json(path, {"d": float("nan"), "inner": Inner("a")})
    assert json.loads(path.read_text()) == {
        "d": None,
        "inner": {"name": "a", "size": None},
    }


def test_files_of_a_run_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run_files.ATTEMPT, "3")
    failure = Failure.of(
        "rank 1", SlurmftError("boom", "look", 9), bad_host="n1", step=4
    )
    assert (failure.attempt, failure.retry, str(failure)) == (3, True, "boom (rank 1)")
    past = Transition(state="running", time=1.0, attempt=1, checkpoint="step-1")
    state = State(state="failed", time=2.0, exit_code=1, history=[past])
    attempt = Attempt(number=2, job="7", hosts=["n1"], changed={"a": "gone"})
    for value in (failure, state, attempt):
        assert decode(json.loads(json.dumps(asdict(value))), type(value)) == value


def test_files_of_the_version_before() -> None:
    state = {"state": "running", "time": 1.0, "reason": "on n1", "exit_code": None}
    extra = {"attempt": 1, "checkpoint": None}
    found = decode(
        state | extra | {"history": [state | extra, state | {"avoided": True}]}, State
    )
    assert [each.avoided for each in found.history] == [False, True]
    attempt = {
        "number": 1,
        "submission": 1,
        "job": "7",
        "restarts": 0,
        "hosts": [],
        "time": 1.0,
    }
    assert decode(attempt, Attempt).changed == {}
    assert (
        decode({"number": 1, "job": "7", "hosts": ["n1"]}, Attempt).submission is None
    )
