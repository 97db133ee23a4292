"""A `HF_HOME` of several users: of one group, and of none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurmft.core import permissions
from tests.conftest import modes
from tests.support.hub import NAME, Hub
from tests.support.models import write_emotion, write_model
from tests.support.users import PROJECT, User, two_users

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to be two other users"
)


@contextmanager
def shared_cache(mode: int, same_group: bool) -> Iterator[tuple[User, User, Path, Hub]]:
    """Two users, their HF_HOME, and the hub that both reach."""
    with (
        two_users(same_group) as (ada, eve),
        Hub(write_model(ada.place / "model")) as hub,
    ):
        cache = ada.place / "hf"
        cache.mkdir()
        os.chown(cache, -1, PROJECT)
        cache.chmod(mode)
        write_emotion(ada.place / "data", train=20, validation=10)
        for path in (ada.place / "data").rglob("*"):
            path.chmod(0o644)
        (ada.place / "data").chmod(0o755)
        yield ada, eve, cache, hub


RANK = """
import os; os.umask(0o077)
from pathlib import Path
from huggingface_hub import hf_hub_download
from transformers import AutoConfig
from slurmft.core.errors import SlurmftError
from slurmft.train import token_cache
from slurmft.train.tasks.hub import from_hub
name = "{name}"
try:
    from_hub("--model", name, lambda: AutoConfig.from_pretrained(name))
except SlurmftError as error:
    raise SystemExit(print(error))
path = from_hub("--model", name, lambda: hf_hub_download(name, "model.safetensors"))
assert Path(path).read_bytes()
from datasets import load_dataset
data = from_hub("--data", "team/data", lambda: load_dataset(
    "json", data_files="{data}/train.jsonl", split="train")) if {with_data} else range(20)
assert len(data) == 20
assert os.umask(0o077) == 0o077
"""
KEEP = """
import os; os.umask(0o077)
from pathlib import Path; from slurmft.train import token_cache
tokens, into = Path("tokens"), Path("into")
tokens.mkdir(); into.mkdir()
(tokens / "meta.json").write_text("{}")
print(token_cache.take(token_cache.folder(), token_cache.key_of({}), into))
try: token_cache.keep(token_cache.folder(), token_cache.key_of({}), tokens)
except PermissionError: print("refused")
print(token_cache.take(token_cache.folder(), token_cache.key_of({}), into))
"""


def load(user: User, cache: Path, hub: Hub, with_data: bool = True) -> str:
    """Loads what a rank does, under a rank's umask; returns its error."""
    code = RANK.format(name=NAME, data=user.place / "data", with_data=with_data)
    return user.python(
        code, HF_HOME=str(cache), HF_ENDPOINT=hub.url(), HF_DATASETS_OFFLINE="1"
    )


@pytest.mark.extra("caches")
def test_users_of_one_group() -> None:
    with shared_cache(0o2770, same_group=True) as (ada, eve, cache, hub):
        for user in (ada, eve):
            assert load(user, cache, hub) == ""
            assert user.python(KEEP, HF_HOME=str(cache)) == "False\nTrue\n"
        assert hub.fetched["model.safetensors"] == 1
        for part in ("hub/models--team--tiny-bert", "datasets"):
            found = [p for p in (cache / part).rglob("*") if not p.is_symlink()]
            assert {p.stat().st_gid for p in found} == {PROJECT}
            for path in found:
                assert path.stat().st_mode & 0o777 in (0o770, 0o660, 0o664), path
        for user in (ada, eve):
            own = modes(cache / f"slurmft-tokens-{user.uid}")
            assert {mode & 0o777 for mode in own["folders"] | own["files"]} == {
                0o700,
                0o600,
            }


@pytest.mark.extra("caches")
def test_users_of_no_group() -> None:
    with shared_cache(0o1777, same_group=False) as (ada, eve, cache, hub):
        for user in (ada, eve):  # the second one reads what the first one may show
            assert load(user, cache, hub, with_data=False) == ""
            assert user.python(KEEP, HF_HOME=str(cache)) == "False\nTrue\n"
        assert not [
            p
            for p in (cache / "hub").rglob("*")
            if p.lstat().st_mode & 0o002 and not p.is_symlink()
        ]
        (cache / "hub").chmod(0o700)
        error, hint = load(eve, cache, hub, with_data=False).splitlines()
        assert error.startswith(f"--model '{NAME}': no permission to use '{cache}/hub")
        assert hint.startswith(
            "hint: a cache of your own: export HF_HOME=DIR; or its owners open"
        )


@pytest.mark.processes
def test_cache_that_is_closed() -> None:
    """Not even to be looked into: there are no tokens, and nothing fails."""
    with two_users() as (ada, eve):
        cache = ada.write(ada.home / "hf" / "x", "").parent
        cache.chmod(0o700)
        assert eve.python(KEEP, HF_HOME=str(cache)) == "False\nrefused\nFalse\n"


@pytest.mark.parametrize(
    ("mode", "group", "file", "folder"),
    [
        (0o2770, 4, 0o660, 0o2770),  # a project's, which hands its group on
        (0o2775, 4, 0o664, 0o2775),
        (0o0770, 4, 0o600, 0o700),  # what is new would be of another group
        (0o0770, 0, 0o660, 0o770),
        (0o1777, 4, 0o644, 0o755),  # never for everybody to write
        (0o0700, 0, 0o600, 0o700),
        (0o0755, 0, 0o644, 0o755),
    ],
)
def test_mode_of_a_cache(
    tmp_path: Path, mode: int, group: int, file: int, folder: int
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, -1, group)
    cache.chmod(mode)
    old = os.umask(0o077)
    try:
        with permissions.as_in(cache / "not" / "there"):
            (cache / "file").touch()
            (cache / "folder").mkdir()
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(old)
    assert modes(cache)["files"] == {file}
    assert (cache / "folder").stat().st_mode & 0o7777 == folder
