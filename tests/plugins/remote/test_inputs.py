"""Which words of a command line name files that are sent: the parsers of the commands say it; the
file of clusters."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slurmft.core.errors import UsageError
from slurmft.plugins.remote import clusters
from slurmft.plugins.remote.clusters import Cluster
from slurmft.plugins.remote.forward import Forwarded

pytestmark = pytest.mark.processes  # git says what belongs to the folder


def sent(*argv: str) -> list[str]:
    """Returns the names of the inputs that a command line sends to a cluster."""
    forwarded = Forwarded(Cluster(name="lab"), list(argv))
    return [path.name for _, path, _ in forwarded._inputs()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    # Nothing is sent: this works where there is neither ssh nor rsync.
    (tmp_path / "bin").mkdir()
    for name in ("ssh", "rsync"):
        (tmp_path / "bin" / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.chdir(tmp_path / "project")
    Path("new.csv").write_text("text\nhello\n")


@pytest.mark.parametrize(
    "switch",
    ["--exclusive", "--no-requeue", "--follow", "--share-with-group", "--strict"],
)
def test_a_switch_takes_no_value(switch: str) -> None:
    assert sent("predict", "last", switch, "new.csv") == ["new.csv"]
    assert sent("submit", switch, "--data", "new.csv") == ["new.csv"]


@pytest.mark.parametrize(
    "words",
    [
        ("submit", "--data=new.csv"),
        ("submit", "--model", "new.csv"),
        ("submit", "--mix", "new.csv:0.2,text_column=a:b"),
        ("submit", "--metric=new.csv:average=macro"),
        ("run", "--accelerate-config", "new.csv", "--", "true"),
        ("study", "run", "new.csv", "--yes"),
        ("data", "new.csv"),
        ("report", "last", "--published", "new.csv"),
    ],
)
def test_inputs_are_sent(words: tuple[str, ...]) -> None:
    assert sent(*words) == ["new.csv"]


def test_what_follows_a_path_stays_behind_it() -> None:
    Path("../a:b").mkdir()
    words = ["submit", "--mix", "new.csv:0.2", "--mix", "../a:b:0.1"]
    forwarded = Forwarded(Cluster(name="lab"), words)
    forwarded._send()
    _, _, first, _, second = forwarded.words
    assert first == "new.csv:0.2"
    # Of another folder: it is among the inputs there.
    assert "/inputs/" in second
    assert second.endswith("/a:b:0.1")


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "last", "--partition", "new.csv"),
        ("list", "--data", "new.csv"),
        ("submit", "--data", "absent.csv"),
        ("study", "run", "."),
        ("command-of-the-cluster", "new.csv"),
    ],
)
def test_other_words_are_not_sent(words: tuple[str, ...]) -> None:
    """A value of a flag that names no input; a filter of `list`; a study's folder, which is there;
    a command that is not installed here."""
    assert sent(*words) == []


def test_the_line_that_makes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is pasted, it has the cluster that was named."""
    monkeypatch.setenv("SLURMFT_CLUSTERS", str(tmp_path / "my files" / "clusters.toml"))
    for names, first in (("lab,lab2", "lab"), ("all", "juwels"), ("x y", "juwels")):
        with pytest.raises(UsageError, match="needs a file that names") as error:
            clusters.named(names)
        assert error.value.hint is not None
        subprocess.run(["sh", "-c", error.value.hint], check=True)
        (cluster,) = clusters.named("all")
        assert (cluster.name, cluster.host) == (first, first)
        clusters.clusters_file().unlink()
