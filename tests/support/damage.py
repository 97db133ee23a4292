"""Damaged files: bytes cut or overwritten, JSON and TOML with other values; and what is no file at
all, which another account may put in its place."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63), 10**400, 1e308, 1e-320, -0.0,
    float("nan"), float("inf"), float("-inf"), "", " ", "a", "-1", "nan", "0-99999999999",
    "12_[0-99999999999]", "99999999999999999999", "-9", "/dev/zero", "/dev/full", "../../x", "..",
    "/", "~", "\x1b]8;;x\x07", "\x00", "a\x00b", "\ud800", "\udcff", "\u202e", "=1+1|'a'!A0",
    "2026-13-45T99:99:99", "9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00", "%s%n{0}", "$(id)",
    "a" * 100_000, "9" * 5000, "line\nline\r\nline",
    [], {}, [[]], [None], [""], [1, "a"], {"": ""}, {"a": []},
    list(range(3000)), {str(number): number for number in range(3000)},
)  # fmt: skip
"""What takes the place of a value."""

_TOML_VALUES = (
    "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "0001-01-01", "9999-12-31T23:59:59-23:59",
    "nan", "-inf", "1e400", "9" * 400, "0x" + "f" * 300, "[]", "{}", "[[[]]]", "[{}]", '""',
    '"\\u0000"', "true", "-1", "0", "[1979-05-27]", "{a = 1979-05-27}", "[1, 'a']", "1.0",
    "[" * 50 + "]" * 50, "[" * 90 + "]" * 90, "[" * 500 + "]" * 500, "[" * 9000 + "]" * 9000,
    "{a = " * 90 + "1" + "}" * 90, "a.b", "'''\n'''", "[9223372036854775807]", "[0]", '["auto"]',
)  # fmt: skip


def damaged(name: str, content: bytes, random: Random) -> bytes:
    """Returns the content of a file, damaged somewhere."""
    if random.random() < 0.25:
        return _damaged_bytes(content, random)
    kind = name.rpartition(".")[2]
    damage = _DAMAGE_OF.get(kind, _damaged_bytes)
    return damage(content, random)


def _damaged_bytes(content: bytes, random: Random) -> bytes:
    begin = random.randint(0, len(content))
    end = begin + random.choice((0, 1, 5, 40, len(content)))
    # A block that is as long as others read at once, and a line that is longer.
    insertions = (
        b"",
        b"\x00",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\n",
        b"\r",
        b'"',
        b"{",
        b"]",
    )
    insertion = random.choice(
        (*insertions, random.randbytes(20), b"\x00" * 2**18, b"x" * 2**23)
    )
    if len(insertion) > 1000 and random.random() < 0.8:
        insertion = b""
    return content[:begin] + insertion + content[end:]


def _damaged_json(content: bytes, random: Random) -> bytes:
    depth = random.choice((60, 65, 200, 900, 100_000))
    if random.random() < 0.03:
        return b"[" * depth + b"]" * depth
    value = json.loads(content)
    for _ in range(random.randint(1, 3)):
        value = _with_another(value, random)
    text = json.dumps(value, ensure_ascii=random.random() < 0.5)
    return text.encode("utf-8", errors="surrogatepass")


def _with_another(value: Any, random: Random) -> Any:
    """Returns a value, within which another one takes the place of one, or one is gone."""
    places = _places(value)
    place = random.choice(places)
    if not place:
        return random.choice((*copy.deepcopy(VALUES), [value], {"a": value}))
    parent = value
    for key in place[:-1]:
        parent = parent[key]
    last = place[-1]
    if random.random() < 0.2:
        del parent[last]
    elif random.random() < 0.1:
        nested: Any = parent[last]
        for _ in range(random.choice((30, 70, 300))):
            nested = [nested]
        parent[last] = nested
    else:
        # A copy: the value may be damaged in turn.
        parent[last] = copy.deepcopy(random.choice(VALUES))
    return value


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value within a value."""
    places = [place]
    if isinstance(value, dict):
        for key, each in value.items():
            places += _places(each, (*place, key))
    if isinstance(value, list):
        for number, each in enumerate(value[:100]):
            places += _places(each, (*place, number))
    return places


def _damaged_records(content: bytes, random: Random) -> bytes:
    lines = content.splitlines(keepends=True)
    number = random.randrange(len(lines))
    lines[number] = _damaged_json(lines[number], random) + b"\n"
    return b"".join(lines)


def _damaged_toml(content: bytes, random: Random) -> bytes:
    lines = content.decode().splitlines()
    with_values = [number for number, line in enumerate(lines) if " = " in line]
    number = random.choice(with_values)
    key = lines[number].partition(" = ")[0]
    value = random.choice(_TOML_VALUES)
    keys = (
        key,
        key,
        key,
        f"{key}.{key}",
        f'"{key} "',
        "a",
        "name",
        "nodes",
        '"\\u202e"',
    )
    lines[number] = f"{random.choice(keys)} = {value}"
    if random.random() < 0.2:
        lines[number] = f"[{key}]"
    return "\n".join(lines).encode()


_DAMAGE_OF: dict[str, Callable[[bytes, Random], bytes]] = {
    "json": _damaged_json,
    "jsonl": _damaged_records,
    "toml": _damaged_toml,
}


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def _sparse_after_text(path: Path) -> None:
    path.write_text("{\n")
    os.truncate(path, 2**40)


def _of_another(path: Path) -> None:
    path.write_text("{}")
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)


NO_FILES: dict[str, Callable[[Path], Any]] = {
    "fifo": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "process": lambda path: path.symlink_to("/proc/self/mem"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("absent"),
    "folder": Path.mkdir,
    "sparse": _sparse,
    "text and holes": _sparse_after_text,
    "one long line": lambda path: path.write_bytes(b"x" * 50_000_000),
    "a million lists": lambda path: path.write_bytes(
        b"[" + b"[],{}," * 1_000_000 + b"0]"
    ),
    "other user's": _of_another,
}
"""Name -> what puts it in a path."""


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
