"""Files that are replaced while others read them, and what they may hold."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from slurmft.core import files
from tests.support.nfs import remember_absent_names


def test_a_file_that_another_node_has_just_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GlusterFS, for a second: see tests/lab."""
    path = tmp_path / "state.json"
    files.write_json(path, {"state": "running"})
    read, stale = Path.read_text, iter([True, True])

    def read_text(self: Path, encoding: str | None = None) -> str:
        if next(stale, False):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(self, encoding)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert files.read_json(path) == {"state": "running"}


def test_a_file_that_stays_stale_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(self: Path, encoding: str | None = None) -> str:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(files, "_STALE_S", 0.0)
    assert files.read_json(tmp_path / "state.json") is None


def test_what_is_written_aside_is_placed_with_what_it_replaces(tmp_path: Path) -> None:
    """GlusterFS, cluster.rsync-hash-regex: by the group's name, not by the whole one."""
    for name in ("state.json", "step-00000001", "a name.with dots"):
        aside = files.aside_of(tmp_path / name).name
        found = re.fullmatch(r"\.(.+)\.[^.]+", aside)
        assert found
        assert found[1] == name
        assert files.ASIDE.fullmatch(aside)


def test_a_file_that_nfs_remembers_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_absent_names(monkeypatch, tmp_path)
    path = tmp_path / "file"
    assert not files.exists_now(path)
    assert not path.exists()
    os.close(os.open(path, os.O_CREAT))  # on another node
    assert not path.exists()
    assert files.exists_now(path)
    assert not files.exists_now(tmp_path / "no folder" / "file")


@pytest.mark.parametrize("text", ["", "[1]", "null", "[" * 100_000, "\udcff"])
def test_a_damaged_file_counts_as_absent(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
    assert files.read_json(tmp_path / "x.json") is None


def test_numbers() -> None:
    assert all(map(files.is_number, [0, -5, 2**63 - 1, 1.5, -(2.0**62)]))
    bad = [False, float("nan"), float("inf"), 10**400, 1e19, "1", None]
    assert not any(map(files.is_number, bad))
