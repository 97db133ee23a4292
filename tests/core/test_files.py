"""Files that are replaced while others read them, and what they may hold."""

from __future__ import annotations

import ast
import errno
import os
import re
from io import BufferedReader
from pathlib import Path

import pytest

import slurmft
from slurmft.core import descent, files, removal
from tests.support.damage import NO_FILES
from tests.support.nfs import remember_absent_names
from tests.support.uses import uses


def test_a_file_that_another_node_has_just_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GlusterFS, for a second: see tests/lab."""
    path = tmp_path / "state.json"
    files.write_json(path, {"state": "running"})
    open_file = files.open_regular
    stale = iter([True, True])

    def open_regular(path: Path) -> BufferedReader:
        if next(stale, False):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return open_file(path)

    monkeypatch.setattr(files, "open_regular", open_regular)
    assert files.read_json(path) == {"state": "running"}
    assert list(stale) == []


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Editors on Windows write it before JSON and TOML that people change."""
    path = tmp_path / "result.json"
    path.write_text('{"state": "running"}', encoding="utf-8-sig")
    assert files.read_json(path) == {"state": "running"}


def test_a_file_that_stays_stale_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_regular(path: Path) -> BufferedReader:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    files.write_json(tmp_path / "state.json", {"state": "running"})
    monkeypatch.setattr(files, "open_regular", open_regular)
    monkeypatch.setattr(files, "_STALE_S", 0.0)
    assert files.read_json(tmp_path / "state.json") is None


def test_what_is_written_aside_is_placed_with_what_it_replaces(tmp_path: Path) -> None:
    """GlusterFS, cluster.rsync-hash-regex: by the group's name, not by the whole one."""
    for name in ("state.json", "step-00000001", "a name.with dots"):
        aside = removal.aside_of(tmp_path / name).name
        found = re.fullmatch(r"\.(.+)\.[^.]+", aside)
        assert found
        assert found[1] == name
        assert removal.ASIDE.fullmatch(aside)


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


NESTED = '{"a":' + "[" * 70 + "]" * 70 + "}"


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "null", "[" * 100_000, "\udcff", NESTED, r'{"a": "\ud800"}',
     r'{"\udfff": 1}', '{"a": 1' + "0" * 5000 + "}"],
)  # fmt: skip
def test_a_damaged_file_counts_as_absent(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
    assert files.read_json(tmp_path / "x.json") is None


def test_values_of_json_and_toml_that_are_right_come_back() -> None:
    assert files.parse_json(r'{"a": ["\ud83d\ude00", "\u0000"]}') == {"a": ["😀", "\0"]}
    assert files.parse_json('"é"'.encode()) == "é"
    with pytest.raises(ValueError, match="utf-8"):
        files.parse_json(b'"\xed\xa0\x80"')
    depth = "[" * 60 + "]" * 60
    assert files.parse_toml(f"a = {depth}") == {"a": files.parse_json(depth)}
    for text in ("a = " + "[" * 90 + "]" * 90, "a = " + "[" * 9000, "a = 1b"):
        with pytest.raises(ValueError, match=r"brackets|line"):
            files.parse_toml(text)


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_read_by_nobody(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state.json"
    NO_FILES[kind](path)
    is_other = kind == "other user's"  # it is a file, and read
    assert (files.read_json(path) == {}) == is_other
    if kind in ("fifo", "zeros", "folder", "sparse", "text and holes", "one long line"):
        with pytest.raises(files.UnfitFileError, match=r"regular|larger than 8 MiB"):
            files.read_text(path)


def test_a_file_that_grows_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000)
    assert files.read_bytes(path) == b"x" * 100_000
    assert files.read_bytes(Path("/proc/self/stat"))  # its size is told as 0
    assert files.read_end(path, 10) == b"x" * 10


def test_holes_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "records"
    with open(path, "w+b") as file:
        file.write(b"begin\n")
        file.seek(2**40)
        file.write(b"end\n")
        file.seek(0)
        text = b""
        while block := files.read_on(file, 2**18):
            text += block.replace(b"\0", b"")
    assert text == b"begin\nend\n"


def test_numbers() -> None:
    assert all(map(files.is_number, [0, -5, 2**63 - 1, 1.5, -(2.0**62)]))
    bad = [False, float("nan"), float("inf"), 10**400, 1e19, "1", None]
    assert not any(map(files.is_number, bad))


READERS_OF_RUNS = (
    "cli",
    "cluster",
    "core",
    "job",
    "programs",
    "runs",
    "show",
    "plugins/mpirun",
    "plugins/notify",
    "plugins/remote",
    "plugins/studies",
    "plugins/trackers",
)
OWN_FILES = {
    "core/bash.py": "a file of slurmft",
    "core/below.py": "what it has opened without waiting, and found regular",
    "core/files.py": "the functions themselves",
    "core/trusted.py": "what nobody else can have written",
    "core/mounts.py": "/proc",
    "core/ownership.py": "/proc",
    "core/process.py": "/proc",
    "core/fingerprint.py": "slurmft's own modules",
    "core/plugins.py": "files of installed packages",
    "programs/environment.py": "the user's project",
    "programs/process_group.py": "/proc",
    "programs/snapshot.py": "the user's program",
    "cli/completion.py": "a file of slurmft",
    "cli/help_pages.py": "files of slurmft",
    "cluster/container.py": "a file of slurmft",
    "cluster/slurm/batch_script.py": "a file of slurmft",
    "plugins/studies/report/build.py": "a file of slurmft",
}
"""Modules that read other files than those of runs and studies."""


def test_files_of_runs_are_read_by_functions_that_no_fifo_keeps() -> None:
    """Runs and studies of others are read, too: only `read_text`, `read_bytes` and `open_regular`
    open their files to read, and only `parse_json` and `parse_toml` parse them."""
    package = Path(slurmft.__file__).parent
    for folder in READERS_OF_RUNS:
        for file in sorted((package / folder).rglob("*.py")):
            name = str(file.relative_to(package))
            if name not in OWN_FILES:
                assert unguarded_reads(file.read_text(encoding="utf-8")) == [], name


_READS = (
    "open to read",
    ".read_text",
    ".read_bytes",
    "json.load",
    "tomllib.load",
    "tomllib.loads",
)


def unguarded_reads(source: str) -> list[str]:
    """The calls by which a module opens files to read them in another way."""
    return [
        f"{line}: {name}" for name, line in uses(ast.parse(source)) if name in _READS
    ]


@pytest.mark.parametrize(
    "source",
    [
        "path.open()",
        "path.open('rb')",
        "from io import open as o; o(x)",
        "from json import load as l",
        "list(map(Path.read_text, paths))",
        "import tomllib as t; t.loads(x)",
    ],
)
def test_read_is_seen_however_it_is_written(source: str) -> None:
    assert unguarded_reads(source)


def test_no_fifo_keeps_who_looks_whether_a_file_is_there_now(tmp_path: Path) -> None:
    """As one that somebody puts in the place of a run that is followed."""
    os.mkfifo(tmp_path / "run")
    assert not files.exists_now(tmp_path / "run" / "records.jsonl")


def test_what_servers_show_in_each_folder_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.getuid() or 4711
    snapshots = tmp_path / ".snapshot"
    folder = os.open(tmp_path, os.O_RDONLY)
    assert descent.is_new(folder)
    snapshots.touch()
    assert not descent.is_new(folder)
    snapshots.unlink()
    snapshots.mkdir()
    os.chown(snapshots, user, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert not descent.is_new(folder)
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # whose it is not
    assert descent.is_new(folder)
    (tmp_path / "file").touch()
    assert not descent.is_new(folder)
    os.close(folder)


def test_error_of_a_file_to_append_to_names_its_path(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    for path in (tmp_path / "records.jsonl", tmp_path / "absent" / "records.jsonl"):
        with pytest.raises(OSError, match=r"records\.jsonl") as raised:
            files.open_to_append(path)
        assert raised.value.filename == str(path)
