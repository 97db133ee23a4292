"""Local data is checked at submission: what a rank would refuse hours later, and what looks odd."""

from __future__ import annotations

import ast
import contextlib
import csv
import gzip
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmft import submit
from slurmft.__main__ import console, main
from slurmft.core import terminal
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.plugins.studies import spec
from slurmft.train import tasks
from slurmft.train.commands import fetch
from slurmft.train.config import TrainConfig
from slurmft.train.login import inputs
from slurmft.train.login import rows as rows_module
from slurmft.train.login.cells import (
    Labels,
    any_empty,
    is_empty,
    label_ids,
    label_numbers,
)
from slurmft.train.login.configure import configure
from slurmft.train.login.rows import ShardRow, read_columns
from slurmft.train.login.sources import (
    check_in_cache,
    fetch_command,
    find_split,
    localize,
    notes_of_names,
    warn_of_near_folders,
)
from tests.conftest import assert_two_lines, slurmft
from tests.support import recorded_warnings
from tests.support.models import write_model, write_pairs, write_splits

TICKETS = "text,label\nlost,delivery\nlate,delivery\ncharged,billing\ntwice,billing\n"
OTHERS = "text,label\nit came late,delivery\nit came twice,billing\n"


def folder_of(
    folder: Path, train: str | bytes = TICKETS, validation: str = OTHERS
) -> Path:
    folder.mkdir()
    for name, content in (("train.csv", train), ("validation.csv", validation)):
        (folder / name).write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    return folder


def test_folder_with_the_data_of_several_tasks(tmp_path: Path) -> None:
    """A study of two recipes has one --data, as GLUE is one data set of the hub."""
    sizes = {"train": 40, "validation": 20}
    write_pairs(tmp_path / "glue" / "mrpc", ("sentence1", "sentence2"), 2, sizes)
    write_pairs(tmp_path / "glue" / "qqp", ("question1", "question2"), 2, sizes)
    study = spec.read_study("icelake-glue")
    for cell in study.cells:
        values = study.fixed | cell | {"data": str(tmp_path / "glue")}
        config = TrainConfig.of(configure(values).program)
        assert config.data == str(tmp_path / "glue" / config.task)
    # What has data itself is the data.
    folder_of(tmp_path / "own")
    write_pairs(tmp_path / "own" / "mrpc", ("sentence1", "sentence2"), 2, sizes)
    train = TrainConfig.resolve(task="mrpc", data=str(tmp_path / "own"))
    assert localize(train).data == str(tmp_path / "own")


def check(data: Path, processes: int = 1, **given: Any) -> tuple[list[str], list[str]]:
    """What the files have, in words; and the warnings."""
    given = {"task": "text-classification", "batch_size": 1} | given
    train = localize(TrainConfig.resolve(data=str(data), **given))
    with recorded_warnings() as found:
        # Of what another test has left open, whenever it is collected.
        warnings.simplefilter("ignore", ResourceWarning)
        read = inputs.check(train, processes)
    assert all(w.category is SlurmftWarning for w in found)
    return [str(facts["what"]) for facts in read.values()], [
        str(w.message) for w in found
    ]


def test_what_there_is(tmp_path: Path) -> None:
    words, said = check(folder_of(tmp_path / "data"))
    assert words == [
        "4 rows, 2 classes: 'delivery' 2 (50 %), 'billing' 2 (50 %); words: median 1, 95 % up to "
        "1, longest 1",
        "2 rows, 2 classes: 'delivery' 1 (50 %), 'billing' 1 (50 %); words: median 3, 95 % up to "
        "3, longest 3",
    ]
    assert not said


def test_what_is_not_as_it_should_be(tmp_path: Path) -> None:
    """Texts that are empty, twice there, or in both splits; a class that a split lacks; what
    --max-length cuts, by the model's tokenizer."""
    long = "it came late and it was broken"
    train = TICKETS + f"late,delivery\n,billing\n,billing\n{long},delivery\n"
    data = folder_of(
        tmp_path / "data",
        train,
        "text,label\nlate,delivery\nlate,delivery\nnever,delivery\n",
    )
    model = write_model(tmp_path / "model")
    words, said = check(data, model=str(model), max_length=8)
    tokens = [len(text.split()) + 2 for text in ("lost", "", long)]
    assert words[0].endswith(
        f"tokens: median {tokens[0]}, 95 % up to {tokens[0]}, longest {tokens[2]}; "
        "1 text cut to 8 tokens, 2 empty, 1 twice or more"
    )
    assert words[1].endswith("longest 3; 1 twice or more, 2 also in train")
    where = str(data / "validation.csv")
    assert said[1:] == [
        f"{where!r}: 2 of its 3 texts are in the training data, too: its metrics are those of "
        "texts that the model has seen; take them out of one of the two",
        f"{where!r} has no row of classes that the training data has: 'billing'",
    ]


@pytest.mark.parametrize("name", ["train.tsv", "train.csv", "train.tsv.gz"])
def test_tabs_between_cells(name: str, tmp_path: Path) -> None:
    data = folder_of(tmp_path / "data")
    (data / "train.csv").unlink()
    content = TICKETS.replace(",", "\t").replace("late", "late, alas; so").encode()
    (data / name).write_bytes(
        gzip.compress(content) if name.endswith("gz") else content
    )
    assert check(data)[0][0].startswith("4 rows, 2 classes: 'delivery' 2")
    assert read_columns(data / name, ["text"])["text"][1] == "late, alas; so"


@pytest.mark.parametrize(
    ("labels", "fact"),
    [
        (
            (1.0, 2.0),
            "row 1 has the label 1.0\nhint: it is a whole number, written as a float",
        ),
        ((1.5, 2.0), "numbers on a scale: --task text-regression"),
    ],
)
def test_labels_that_are_floats(
    labels: tuple[float, float], fact: str, tmp_path: Path
) -> None:
    rows = [{"text": f"text {i}", "label": labels[i % 2]} for i in range(6)]
    with pytest.raises(UsageError) as error:
        check(write_splits(tmp_path / "data", {"train": rows, "validation": rows[:2]}))
    assert fact in str(error.value)


def test_labels_of_a_csv_that_are_floats(tmp_path: Path) -> None:
    """They are texts there, and so may be meant as they are."""
    said = check(
        folder_of(
            tmp_path / "data",
            "text,label\na,1.0\nb,2.0\nc,1.0\n",
            "text,label\nd,2.0\n",
        )
    )[1]
    assert "has whole numbers as labels that are written as floats" in said[0]
    assert "'1.0', '2.0'; pandas writes them so" in said[0]


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (
            TICKETS + "gone,\nnever,  \n",
            "'{}': 2 of 6 rows have no label: rows 5, 6\nhint: give",
        ),
        (
            TICKETS + "a text, with a comma,billing\n",
            "'{}': line 6 has 3 cells, not the header's 2",
        ),
        (
            TICKETS + "half a row\n",
            "'{}': line 6 has 1 cells, not the header's 2\nhint: a cell that holds a line break is",
        ),
        (
            "text,label\nlost, and gone\tdelivery\nlate\tbilling\n",
            "'{}': line 3 has 1 cells, not the header's 2\nhint: commas separate the names in the "
            "header, tabs the cells of this row; if all rows are so: sed -i '1s/,/\\t/g' ",
        ),
        (
            "text\tlabel\nlost,delivery\n",
            "'{}': line 2 has 1 cells, not the header's 2\nhint: tabs separate the names in the "
            "header, commas the cells of this row; if all rows are so: sed -i '1s/\\t/,/g' ",
        ),
        (
            TICKETS + '"never closed,billing\n',
            "'{}': a quote is left open in the row that begins in line 6",
        ),
        (
            TICKETS.encode() + b"caf\xe9,billing\n",
            "'{}': line 6 is not UTF-8: it has the byte 0xe9\nhint: if 'café' is right there, the "
            "file is Windows-1252 (latin-1): iconv -f WINDOWS-1252 -t UTF-8 ",
        ),
        (TICKETS.encode("utf-16"), "'{}': line 1 is not UTF-8 but UTF-16, as Excel's"),
        (TICKETS.encode("utf-16le"), "'{}': line 1 is not UTF-8 but UTF-16LE"),
        (TICKETS.encode("utf-16be"), "'{}': line 1 is not UTF-8 but UTF-16BE"),
        (
            TICKETS.replace(",", ";"),
            "'{}': its cells are separated by semicolons: 'text;label'\nhint: separate them by",
        ),
        (
            TICKETS.replace(",", "|"),
            "'{}': its cells are separated by vertical bars: 'text|label'\nhint: separate them by",
        ),
        # The quote of the next row closes it.
        (
            TICKETS + '\n"left open,billing\n"closed",billing\n',
            "'{}': a quote is left open in the row that begins in line 7",
        ),
        (
            TICKETS + '\n"two "quotes",billing\n',
            "'{}': line 7: ',' expected after '\"'",
        ),
        (
            "sep=;\n" + TICKETS.replace(",", ";"),
            "'{}': its first line, 'sep=;', is for spreadsheets alone\nhint: write the file "
            "without it: python -c",
        ),
        (
            "sep=,\n" + TICKETS,
            "'{}': its first line, 'sep=,', is for spreadsheets alone",
        ),
        (
            TICKETS + 'lost,"left open\n' + "a,x\n" * 40,
            "'{}': a quote is left open in the row that begins in line 6",
        ),
        (
            "text,label\n" + "".join(f"text {n},{n / 40}\n" for n in range(40)) * 2,
            "'{}': row 1 has the label '0.0'",
        ),
        ("text,label\n", "'{}' has no rows"),
        ("", "'{}' has no rows"),
        (
            "text,class\nlost,delivery\n",
            "'{}' has no column 'label'\nhint: it has text, class;",
        ),
        ("text,label\n" + "a,x\n" * 4, "'{}' has the one label 'x'"),
        ("text,label\n" + ",x\n,y\n" * 4, "'{}': no row has a text"),
    ],
)
def test_csv_that_cannot_be_right(
    content: str | bytes, fact: str, tmp_path: Path
) -> None:
    data = folder_of(tmp_path / "data", content)
    with pytest.raises(UsageError) as error:
        check(data)
    assert fact.format(data / "train.csv") in str(error.value)


SPREADSHEET = b"PK\x03\x04" + b"\0" * 40
ROWS = [
    (f"the parcel {n} came late", ("delivery", "billing")[n % 2]) for n in range(60)
]


def csv_of(
    rows: list[tuple[str, Any]], separator: str = ",", header: bool = True
) -> str:
    lines = [f"{text}{separator}{label}\n" for text, label in rows]
    if header:
        lines.insert(0, f"text{separator}label\n")
    return "".join(lines)


WRONG_FILES: dict[str, tuple[str | bytes, str, str]] = {
    "separator": (csv_of(ROWS, ";"), "separated by semicolons", "separate them by commas"),
    "encoding": (
        csv_of([("caf\xe9", "billing")]).encode("latin-1"),
        "line 2 is not UTF-8",
        "iconv -f WINDOWS-1252",
    ),
    "header": (
        csv_of(ROWS, header=False),
        "begins with a row, without the names of columns: the parcel 0 came late, delivery",
        "sed -i '1i text,label' data/train.csv",
    ),
    "short": (
        csv_of([("good", "yes"), ("bad", "no"), ("fine", "yes")] * 9, header=False),
        "begins with a row, without the names of columns: good, yes",
        "sed -i '1i text,label' data/train.csv",
    ),
    "short-of-tabs": (
        csv_of([("good", "yes"), ("bad", "no"), ("fine", "yes")] * 9, "\t", header=False),
        "begins with a row, without the names of columns: good, yes",
        r"sed -i '1i text\tlabel' data/train.csv",
    ),
    "header-twice": (
        "review,stars\n" + csv_of(ROWS, header=False) + "review,stars\n",
        "has no column 'text'",
        "it has review, stars",
    ),
    "old-excel": (
        csv_of([("caf\xe9", "billing"), ("late", "delivery")] * 9, ";").encode("latin-1"),
        "separated by semicolons",
        "sep=';', dtype=str, encoding='cp1252')",
    ),
    "commas": (
        csv_of([(text, f'"{n},5"') for n, (text, _) in enumerate(ROWS)]),
        "row 1 has the label '0,5'",
        "--task text-regression, with a point: 0.5 (pandas",
    ),
    "percent": (
        csv_of([(text, f"{n} %") for n, (text, _) in enumerate(ROWS)]),
        "row 1 has the label '0 %'",
        "--task text-regression, without a sign: 0;",
    ),
    "two": (csv_of(ROWS[:2]), "has another label in every row", "add rows, or choose"),
    "class": (csv_of([("late", "x")] * 9), "has the one label 'x'", "add rows of others"),
    "floats": (
        csv_of([(text, n / 7) for n, (text, _) in enumerate(ROWS)]),
        "row 1 has the label '0.0'",
        "--task text-regression",
    ),
    "empty": ("", "has no rows", "it is empty"),
    "names": ("text,label\n", "has no rows", "add rows"),
    "spreadsheet": (SPREADSHEET, "is a spreadsheet", "save it as CSV (UTF-8)"),
    "old-mac": (  # below a header of today; where all lines end so, they are read
        csv_of(ROWS).replace("\n", "\r").replace("\r", "\n", 1),
        "has a carriage return within a cell",
        r"tr '\r' '\n' < data/train.csv > new && mv new data/train.csv",
    ),
    "pointer": (
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "is a pointer of git-lfs",
        "git lfs pull",
    ),
    "page": ("<!DOCTYPE html>\n<html>\n", "is a web page", "download the file itself"),
    "numbers": (
        csv_of([(text, n) for n, (text, _) in enumerate(ROWS)]),
        "has another label in every row",
        "--task text-regression",
    ),
    "packed": (gzip.compress(b"text,label\n"), "is a .gz", "add .gz to its name"),
    "duplicates": (csv_of(ROWS), "are in the training data", "take them out"),
    "case": (
        csv_of(ROWS + [(text, label.title()) for text, label in ROWS]),
        "differ only by white space, case or Unicode",
        ".str.lower()",
    ),
    "large": (
        csv_of([(f"{text} {n}", label) for n in range(1700) for text, label in ROWS])
        + ",billing\n",
        "1 of 102,001 rows have an empty text: row 102001",
        "",
    ),
}  # fmt: skip
"""What is wrong -> the file, what is told of it, and the cure."""


@pytest.mark.parametrize("name", WRONG_FILES)
def test_wrong_files(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each is told before anything is submitted, with its cure, in two lines at most."""
    monkeypatch.chdir(tmp_path)
    content, fact, cure = WRONG_FILES[name]
    data = folder_of(tmp_path / "data", content)
    if name == "duplicates":
        (data / "validation.csv").write_text(csv_of(ROWS[:20]))
    words = ["submit", "--task", "text-classification", "--data", str(data)]
    with recorded_warnings() as found:
        code = console([*words, "--cluster", "local", "--dry-run"])
    told = capsys.readouterr().err.splitlines() or [str(w.message) for w in found]
    if code:
        error, hint = told
        assert error.startswith("error: ")
        assert hint.startswith("hint: ")
    assert fact in told[0]
    assert cure in told[-1] + told[0]
    # The same of one file.
    if name != "duplicates":
        assert console(["data", str(data / "train.csv")]) == code
        out, err = capsys.readouterr()
        assert fact in out + err


@pytest.mark.processes
@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("name", ["old-excel", "encoding", "header", "old-mac"])
def test_cure_of_a_file_works_as_typed(
    name: str,
    ending: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From another folder than that of the file, as the submission was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    folder_of(tmp_path / "my data", WRONG_FILES[name][0])
    file = tmp_path / "my data/train.csv"
    if ending:
        file.with_name("train.csv.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    words = ["data", f"my data/train.csv{ending}"]
    assert console(words) == 2
    hint = capsys.readouterr().err.splitlines()[-1]
    command = re.search(r"\b(gunzip|python|iconv|sed|tr) .*?(?=; else|$)", hint)
    assert command is not None
    subprocess.run(["bash", "-c", command[0]], check=True)
    words = ["data", str(find_split(tmp_path / "my data", "train"))]
    # Of the encoding, the file has one class: it can be read, and is no longer misread.
    assert console(words) == (2 if name == "encoding" else 0)
    err = capsys.readouterr().err
    assert "is not UTF-8" not in err
    assert "cannot read" not in err


def test_web_pages(tmp_path: Path) -> None:
    """One is told by how it begins, and may be a plain text to train on."""
    for number, start in enumerate(
        ("<!doctype html>", "\n \n<HTML lang=de>", "\ufeff<html>")
    ):
        page = tmp_path / f"{number}.csv"
        page.write_text(f"{start}\n<p>text,label</p>\n")
        with pytest.raises(UsageError, match="is a web page"):
            read_columns(page)
        text = page.rename(page.with_suffix(".txt"))
        assert "<p>" in read_columns(text, ["text"])["text"][0]


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        # A name has a comma, and so have texts.
        ("text, cleaned\tlabel\na, b, c\tx\nd\ty\n", {"text, cleaned", "label"}),
        ("text,raw\tlabel\na, b\tx\nd\ty\n", {"text,raw", "label"}),
        # Tabs within names and cells of a file with commas.
        ("text\traw,label\na,x\nb,y\n", {"text\traw", "label"}),
        ("text\traw,label\na\tb,x\nc\td,y\n", {"text\traw", "label"}),
        ("text\tlabel\na, b\tx\n", {"text", "label"}),
    ],
)
def test_tabs_in_a_csv(content: str, columns: set[str], tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(content)
    assert read_columns(tmp_path / "train.csv").keys() == columns


@pytest.mark.parametrize("name", ["train.tsv", "Train.TSV", "my.tsv.TSV.GZ"])
def test_commas_in_a_tsv(name: str, tmp_path: Path) -> None:
    content = TICKETS.encode()
    if name.lower().endswith(".gz"):
        content = gzip.compress(content)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match="separated by commas") as error:
        read_columns(tmp_path / name)
    _, old, new = shlex.split(str(error.value.hint).rpartition(": ")[2])
    os.rename(old, new)
    assert read_columns(Path(new))["label"]


@pytest.mark.processes
def test_packed_files_are_unpacked_into_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    folder = tmp_path / "my data"
    folder.mkdir()
    for name, tool in (
        ("train.csv.7z", "7z x -o'my data' "),
        ("train.csv.zip", "python "),
    ):
        file = folder / name
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("train.csv", TICKETS)
        with pytest.raises(UsageError, match="has no train file") as error:
            find_split(folder, "train")
        command = str(error.value.hint).removeprefix("unpack it: ")
        assert command.startswith(tool)
        if name.endswith(".7z"):
            file.unlink()
    subprocess.run(["bash", "-c", command], check=True)
    assert find_split(folder, "train").parent == folder


def test_errors_about_data_have_a_cure() -> None:
    """A UsageError of a message alone leaves its reader alone."""
    for file in Path(inputs.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "UsageError":
                assert len(node.args) == 2, (file.name, node.lineno)


def test_a_file_that_is_no_data(tmp_path: Path) -> None:
    cures = {
        "tickets.xlsx": "save it as CSV",
        "tickets.docx": "give one of",
        "tickets.csv.ZIP": "unpack it: python -m zipfile -e ",
    }
    for name, cure in cures.items():
        (tmp_path / name).write_bytes(SPREADSHEET)
        task = ["--task", "text-classification"]
        for command in (["data"], ["submit", *task, "--dry-run", "--data"]):
            with pytest.raises(UsageError, match="is no file of rows") as caught:
                main([*command, str(tmp_path / name)])
            assert cure in str(caught.value.hint)


def test_name_of_the_hub_that_is_almost_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/tickets").mkdir(parents=True)
    for name, near in (
        ("imdb", ""),
        ("dta", "did you mean data?"),
        ("data/ticket", "did you mean data/tickets?"),
        ("data/tickets", ""),
        ("nyu-mll/glue", ""),
    ):
        train = TrainConfig.resolve(task="text-classification", data=name)
        with recorded_warnings() as found:
            warn_of_near_folders(train)
        assert "".join(str(each.message) for each in found).endswith(near)
        assert bool(found) == bool(near)


def test_folder_in_the_place_of_a_split(tmp_path: Path) -> None:
    """As of a data set that has a text a file, in a folder for each class."""
    (tmp_path / "train/pos").mkdir(parents=True)
    with pytest.raises(UsageError, match="it has train/") as caught:
        find_split(tmp_path, "train")
    assert "train/ is a folder: write its rows into one file" in str(caught.value.hint)


ROW = {"text": "lost", "label": "delivery"}
OTHER = {"text": "twice", "label": "billing"}


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        (
            '{"text": "lost", "lab',
            'line 5 is no JSON object: \'{"text": "lost", "lab\', where the',
        ),
        ("[1, 2]\n", "line 5 is no JSON object: '[1, 2]'\nhint: each line is one row"),
        ("[" * 100_000 + "\n", "line 5 is no JSON object"),
        (json.dumps(ROW | {"text": None}), "row 5 has no text"),
        (json.dumps(ROW | {"text": 7}), "row 5 has 7 in the column"),
        (json.dumps(ROW | {"label": 7}), "row 5 has the label 7"),
        (json.dumps(ROW | {"label": ["x"]}), "row 5 has the label ['x']"),
        (json.dumps({"text": "lost"}), "1 of 5 rows have no label: row 5"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines_that_cannot_be_right(
    line: str, fact: str, suffix: str, tmp_path: Path
) -> None:
    data = write_splits(tmp_path / "data", {"train": [], "validation": [ROW, OTHER]})
    (data / "train.jsonl").unlink()
    text = "".join(json.dumps(row) + "\n" for row in [ROW, OTHER] * 2) + line
    packed = gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode()
    (data / f"train{suffix}").write_bytes(packed)
    with pytest.raises(UsageError) as error:
        check(data)
    assert f"{str(data / f'train{suffix}')!r}: {fact}" in str(error.value)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def reconfigure(self, errors: str) -> None:
        pass


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_progress_of_a_long_check(
    stream: type[io.StringIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As commands print it, which print no others' escapes; and nothing in a pipe."""
    data = folder_of(tmp_path / "data")
    (data / "train.csv").write_text(
        "text,label\n" + "late,delivery\ntwice,billing\n" * 2000
    )
    made = stream()
    monkeypatch.setattr(terminal, "_PROGRESS_EVERY_S", -1.0)
    monkeypatch.setattr(sys, "stderr", made)
    if stream is Terminal:
        monkeypatch.setattr(sys, "stdout", Terminal())
        terminal.protect()
    check(data)
    found = made.getvalue()
    if stream is Terminal:
        assert "\x1b[Kchecking 'train.csv': " in found
        assert found.endswith("\x1b[K\r")
    else:
        assert found == ""


@pytest.mark.parametrize(
    "content",
    [gzip.compress(TICKETS.encode())[:-9], b"\x1f\x8b\x08garbage"],
    ids=["cut", "garbage"],
)
def test_damaged_gzip(content: bytes, tmp_path: Path) -> None:
    data = folder_of(tmp_path / "data")
    (data / "train.csv").unlink()
    (data / "train.csv.gz").write_bytes(content)
    with pytest.raises(UsageError, match="cannot read"):
        check(data)


@pytest.mark.processes
@pytest.mark.parametrize("closed", ["train.csv", "."])
def test_files_of_others(closed: str) -> None:
    """Read as a user who may not."""
    with tempfile.TemporaryDirectory() as top:  # pytest's are closed to others
        Path(top).chmod(0o755)
        data = folder_of(Path(top) / "data")
        (data / closed).chmod(0)
        read, write = os.pipe()
        if not (pid := os.fork()):
            if os.getuid() == 0:
                os.setresuid(65534, 65534, 65534)
            try:
                check(data)
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        (data / closed).chmod(0o755)
        expected = {
            "train.csv": f"cannot read {str(data / 'train.csv')!r}: Permission denied",
            ".": f"the data folder {str(data)!r} is closed to nobody\nhint: ask its owner",
        }
        assert (
            os.read(read, 10_000).decode().startswith(f"UsageError: {expected[closed]}")
        )


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "validation"):
        table = pa.Table.from_pylist([ROW, OTHER, ROW, {"text": "x", "label": None}])
        pyarrow.parquet.write_table(table, data / f"{split}.parquet")
    with pytest.raises(UsageError, match="1 of 4 rows have no label: row 4"):
        check(data)


def test_label_in_validation_alone(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "data", TICKETS, TICKETS + "how?,question\n")
    with pytest.raises(UsageError) as error:
        check(data)
    where = str(data / "validation.csv")
    assert str(error.value) == (
        f"{where!r}: row 5 has the label 'question'\nhint: labels are billing, delivery; "
        "add rows of this one to the training data, or take it out here"
    )


def test_labels_that_look_alike(tmp_path: Path) -> None:
    data = folder_of(
        tmp_path / "data", TICKETS + "x,delivery \ny,Delivery\nz,delivery \n"
    )
    words, said = check(data)
    assert words[0].startswith("7 rows, 4 classes")
    assert said[:1] == [
        f"{str(data / 'train.csv')!r} has labels that differ only by white space, case or "
        "Unicode normal form, and are classes of their own: 'delivery' (2 rows), 'delivery ' "
        "(2 rows), 'Delivery' (1 row); "
        "write each in one way, as pandas' .str.strip().str.lower().str.normalize('NFC') does"
    ]


def test_labels_of_another_unicode_form(tmp_path: Path) -> None:
    """An accent may be a character of its own: nobody sees it."""
    data = folder_of(tmp_path / "data", TICKETS + "x,caf\xe9\ny,cafe\u0301\n")
    _, (remark, *_) = check(data)
    assert r"'caf\xe9' (1 row), 'cafe\u0301' (1 row); write each in one way" in remark
    data = folder_of(
        tmp_path / "other", TICKETS + "x,caf\xe9\n", "text,label\ny,cafe\u0301\n"
    )
    with pytest.raises(UsageError) as error:
        check(data)
    assert str(error.value.hint).startswith(
        r"it is not 'caf\xe9', but 'cafe\u0301': write each in one way"
    )


def test_numbers_in_csv(tmp_path: Path) -> None:
    """Cells are texts; classes are in the order of the numbers."""
    data = folder_of(
        tmp_path / "data", "text,label\n" + "a,10\nb,1\nc,2\nd,1\n", "text,label\na,2\n"
    )
    words, _ = check(data)
    assert words[0].startswith(
        "4 rows, 3 classes: '1' 2 (50 %), '10' 1 (25 %), '2' 1 (25 %); "
    )
    task: Any = tasks.get(
        TrainConfig.resolve(task="text-classification", data=str(data))
    )
    assert task.label_names(task.rows("train")) == ["1", "2", "10"]
    assert task.labels(task.rows("validation"), ["1", "2", "10"]) == [1]
    assert label_ids(["1", "b"], ["a", "b"], "a file") == [1, 1]
    assert label_numbers(["4.5", 1], "a file") == [4.5, 1.0]
    # What makes texts equal does not help a number.
    with pytest.raises(UsageError) as error:
        label_ids([3], ["3", "4"], "a file")
    assert error.value.hint == "labels are 0 to 1, or 3, 4"


def test_texts_that_are_empty(tmp_path: Path) -> None:
    said = check(folder_of(tmp_path / "data", TICKETS + ",billing\n" * 7))[1]
    assert "7 of 11 rows have an empty text: rows 5, 6, 7, 8, 9 and 2 more" in said[0]


def test_numbers_that_are_all_equal(tmp_path: Path) -> None:
    """A correlation with them cannot be computed; two of them are enough for one."""
    numbers = "text,label\n" + "".join(f"word{n},{n}\n" for n in range(5))
    equal = "text,label\nfirst,0.5\nsecond,0.5\n"
    given: dict[str, Any] = {
        "task": "text-regression",
        "text_column": "text",
        "label_column": "label",
    }
    said = check(folder_of(tmp_path / "data", numbers, equal), **given)[1]
    assert [each for each in said if "has one score only, 0.5" in each]
    said = check(folder_of(tmp_path / "other", numbers, numbers), **given)[1]
    assert not [each for each in said if "one score" in each]


def test_rows_for_the_ranks(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "data")
    with pytest.raises(UsageError, match="has 4 rows for 5 processes"):
        check(data, processes=5)
    assert (
        "4 rows, fewer than the 8 of an optimizer step"
        in check(data, 4, batch_size=2)[1][0]
    )
    assert not check(data, 4, batch_size=2, max_global_batch_size=4)[1]
    flags = {"task": "text-classification", "data": str(data), "nodes": 2}
    with pytest.raises(UsageError, match="has 4 rows for 8 processes"):
        configure(flags | {"gpus_per_node": 4})
    with pytest.raises(UsageError, match="has 4 rows for 6 processes"):
        configure(flags | {"gpus_per_node": 4, "nproc_per_node": 3})


def test_model_that_knows_other_classes(tmp_path: Path) -> None:
    data, model = folder_of(tmp_path / "data"), tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    for known, head in (
        (["LABEL_0", "LABEL_1", "LABEL_2"], None),
        (["billing", "delivery"], None),
        (["delivery", "billing"], "its head is trained for them"),
        (["x", "y", "z"], "its head is replaced"),
    ):
        (model / "config.json").write_text(
            json.dumps({"id2label": dict(enumerate(known))})
        )
        said = check(data, model=str(model))[1]
        assert [text.rpartition(": ")[2] for text in said] == (
            [head] if head else []
        ), known


def test_a_check_that_takes_too_long_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest may hold what was not seen: a label that validation has, and training not so far."""
    monkeypatch.setattr(inputs, "CHECK_S", 0.0)
    monkeypatch.setattr(rows_module, "_BLOCK_BYTES", 64)
    rows = "".join(
        f"text {number},{'ab'[number > 15_000]}\n" for number in range(20_000)
    )
    data = folder_of(tmp_path / "data", "text,label\n" + rows, "text,label\n" + "x,b\n")
    words, said = check(data)
    assert words[0].startswith(
        "1,000 rows, 1 class: 'a' 1,000 (100 %) in the first 4% of the file; "
    )
    assert (
        "the first 4% were checked, 1,000 rows, in 0 s; the job checks the rest"
        in said[0]
    )


@pytest.mark.parametrize(
    "content",
    [
        TICKETS + "gone,\n",
        "text,label\n" + "a,1\n,2\n" * 2,
        TICKETS,
        "text,label\na,x\n",
    ],
)
def test_ranks_find_what_the_login_node_finds(content: str, tmp_path: Path) -> None:
    """One code for both."""
    data = folder_of(tmp_path / "data", content, content)
    config = TrainConfig.resolve(task="text-classification", data=str(data))
    task: Any = tasks.get(config)

    def on_a_rank() -> list[str]:
        train = task.rows("train")
        names: list[str] = task.label_names(train)
        assert task.labels(train, names) is not None
        return names

    found = []
    for read in (lambda: check(data), on_a_rank):
        try:
            found.append(str(read() and ""))
        except UsageError as error:
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.processes
@pytest.mark.parametrize("values", [{}, {"validation_fraction": 0.1}])
def test_data_without_a_task(tmp_path: Path, values: dict[str, Any]) -> None:
    """An error about the default would name a task that nobody has typed."""
    folder = folder_of(tmp_path / "my data", TICKETS)
    with pytest.raises(UsageError, match="my data' without --task: nothing") as error:
        submit(data=folder, cluster="local", runs_dir=tmp_path, **values)
    look = f"slurmft data '{folder}'"
    assert error.value.hint is not None
    assert look in error.value.hint
    assert slurmft(*shlex.split(look)[1:]).code == 0


@pytest.mark.processes
def test_submit_refuses_before_anything_is_written(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "data", TICKETS + "gone,\n")
    source = (
        "--task",
        "text-classification",
        "--data",
        str(data),
        "--runs-dir",
        str(tmp_path),
    )
    done = slurmft("submit", *source, "--cluster", "local")
    assert_two_lines(done, "1 of 5 rows have no label: row 5")
    assert os.listdir(tmp_path) == ["data"]


def test_data_for_a_task_that_generates_its_own(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="--task synthetic generates its data, and reads no"
    ):
        submit(
            task="synthetic",
            data=folder_of(tmp_path / "data", TICKETS),
            cluster="local",
            runs_dir=tmp_path,
        )
    assert os.listdir(tmp_path) == ["data"]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["csv", "jsonl", "csv.gz"]),
    st.binary(max_size=40),
    st.integers(0, 80),
)
def test_any_bytes_are_read_or_refused(suffix: str, noise: bytes, place: int) -> None:
    content = TICKETS.encode() if "csv" in suffix else json.dumps(ROW).encode() * 2
    content = gzip.compress(content) if suffix.endswith("gz") else content
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(UsageError):
        path = Path(folder) / f"train.{suffix}"
        path.write_bytes(content[:place] + noise + content[place + len(noise) // 2 :])
        Labels("f", read_columns(path, ["text", "label"])["label"]).names()


@given(
    st.lists(st.sampled_from(["a", " a", "", " \t", "\u2028", None, 0, 1.5, ["b"], {}]))
)
def test_empty_cells_are_seen_among_others(cells: list[Any]) -> None:
    """Texts alone go another way than others."""
    assert any_empty(cells) == any(map(is_empty, cells))


@given(
    st.lists(
        st.sampled_from([1, True, 1.0, "1", "a", None, "", float("nan")]), max_size=9
    ),
    st.integers(1, 4),
)
def test_labels_are_counted_alike_in_parts_of_any_size(
    values: list[Any], size: int
) -> None:
    """By type and value, with the first row of each."""
    one_by_one = Labels("f")
    for row, value in enumerate(values, 1):
        one_by_one.add([(row, value)])
    in_parts = Labels("f")
    for start in range(0, len(values), size):
        part = list(enumerate(values[start : start + size], start + 1))
        in_parts.add(part, number=lambda row: ShardRow(row, "a.csv"))
    assert in_parts.counts == one_by_one.counts
    assert in_parts.first == one_by_one.first
    assert in_parts.empty == one_by_one.empty
    assert in_parts.rows == one_by_one.rows == len(values)
    assert all(str(row).endswith(" of a.csv") for row in in_parts.first.values())
    with pytest.raises(UsageError, match="row 3 has the label"):
        one_by_one.add([(3, ["a list"])])


WRONG_LINES = {
    "bytes": b'{"text": "a\xff", "label": "x"}',
    "broken": b'{"text": "a"',
    "no label": b'{"text": "a"}',
    "no text": b'{"text": null, "label": "x"}',
    "number": b'{"text": 3, "label": "x"}',
    "list": b'{"text": "a", "label": ["x"]}',
    "half": b'{"text": "a\\ud83d", "label": "x"}',
}


@pytest.mark.parametrize("first", list(WRONG_LINES))
@pytest.mark.parametrize("second", list(WRONG_LINES))
@pytest.mark.parametrize("apart", [1, 1500])
def test_of_two_wrong_lines_the_first_is_named(
    first: str, second: str, apart: int, tmp_path: Path
) -> None:
    """Whatever is wrong with them: bytes, lines and values are looked at one after the other."""
    fine = [b'{"text": "a b", "label": "x"}', b'{"text": "c", "label": "y"}'] * 3
    others = fine[:1] * (apart - 1)
    lines = [*fine, WRONG_LINES[first], *others, WRONG_LINES[second], *fine]
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in (("train", lines), ("validation", fine)):
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(content) + b"\n")
    config = TrainConfig.resolve(task="text-classification", data=str(folder))
    with pytest.raises(UsageError) as error:
        inputs.look(config)
    message = error.value.message
    assert re.search(r"(line|row) 7\b|rows 7,", message), message


def test_every_door_has_the_check(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "data", TICKETS + "gone,\n")
    fact = "1 of 5 rows have no label: row 5"
    source = ["--task", "text-classification", "--data", str(data)]
    with pytest.raises(UsageError, match=fact):
        submit(
            task="text-classification", data=data, cluster="local", runs_dir=tmp_path
        )
    with pytest.raises(UsageError, match=fact):
        fetch.main(["some/model", str(data), *source[:2]])


@pytest.mark.processes
def test_dry_run_shows_the_data_and_imports_nothing_heavy(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "data", TICKETS + "odd,Billing\n")
    source = ("--task", "text-classification", "--data", str(data), "--batch-size", "2")
    done = slurmft("submit", *source, "--cluster", "local", "--dry-run")
    assert done.code == 0
    assert (
        f"{data}/train.csv: 5 rows, 3 classes: 'delivery' 2 (40 %), 'billing' 2 (40 %), "
        "'Billing' 1 (20 %); words: median 1" in done.out
    )
    assert done.err.splitlines()[:1] == [
        f"warning: {str(data / 'train.csv')!r} has labels that differ only by white space, case or "
        "Unicode normal form, and are classes of their own: 'billing' (2 rows), 'Billing' "
        "(1 row); "
        "write each in one way, as pandas' .str.strip().str.lower().str.normalize('NFC') does"
    ]


@pytest.mark.skipif(
    "SLURMFT_TEST_DATA" not in os.environ, reason="no folder of real data sets"
)
def test_real_data() -> None:
    words, said = check(
        Path(os.environ["SLURMFT_TEST_DATA"]) / "emotion", task="emotion"
    )
    assert words[0].startswith(
        "16,000 rows, 6 classes: 1 5,362 (34 %), 0 4,666 (29 %), "
    )
    assert words[0].endswith("31 twice or more")  # as the folder's README says
    assert words[1].endswith("5 also in train")
    assert not said


@pytest.mark.parametrize(
    ("train", "validation"),
    [
        ("train.csv", "dev.csv"),
        ("Train.csv", "Val.csv"),
        ("training.csv", "valid.csv"),
        ("data/train.csv", "data/eval.csv"),
        ("TRAIN.CSV", "Val.CSV.GZ"),
        ("Train.JSONL", "VAL.TSV"),
    ],
)
def test_splits_by_other_names(tmp_path: Path, train: str, validation: str) -> None:
    for name, content in ((train, TICKETS), (validation, OTHERS)):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        if "jsonl" in name.lower():
            rows = csv.DictReader(content.splitlines())
            content = "".join(json.dumps(row) + "\n" for row in rows)
        if "tsv" in name.lower():
            content = content.replace(",", "\t")
        if "gz" in name.lower():
            file.write_bytes(gzip.compress(content.encode()))
        else:
            file.write_text(content)
    check(tmp_path)
    assert find_split(tmp_path, "train").name == Path(train).name
    assert find_split(tmp_path, "validation").name == Path(validation).name


def test_the_name_of_the_split_goes_first_and_two_others_are_a_mistake(
    tmp_path: Path,
) -> None:
    for name in ("validation.csv", "dev.csv"):
        (tmp_path / name).write_text(OTHERS)
    assert find_split(tmp_path, "validation").name == "validation.csv"
    (tmp_path / "train.csv").write_text(TICKETS)
    config = TrainConfig.resolve(task="text-classification", data=str(tmp_path))
    (note,) = notes_of_names(config)
    assert note.endswith(
        "validation.csv' is the validation split: 'dev.csv' is not read"
    )
    (tmp_path / "validation.csv").rename(tmp_path / "Valid.csv")
    with pytest.raises(UsageError, match=r"more than one validation file: Valid.csv"):
        find_split(tmp_path, "validation")


def test_folder_without_a_split_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "tickets.xlsx").write_text("")
    with pytest.raises(UsageError) as error:
        find_split(tmp_path, "train")
    assert "it has tickets.xlsx" in error.value.message
    assert error.value.hint == (
        "open the spreadsheet, and save it as CSV (UTF-8): train.csv"
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("is_list", "ending"), [(True, ".json"), (False, ".json"), (True, ".jsonl")]
)
def test_a_json_says_how_it_becomes_lines(
    is_list: bool, ending: str, tmp_path: Path
) -> None:
    """The line that is advised makes a file that is read."""
    rows = [ROW | {"text": "caf\u00e9 \u2028"}, OTHER]
    text = json.dumps(rows, indent=1, ensure_ascii=False)
    if not is_list:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / f"train{ending}").write_text(text, encoding="utf-8")
    fact = "has no train file|line 1 is no JSON object"
    with pytest.raises(UsageError, match=fact) as error:
        read_columns(find_split(tmp_path, "train"))
    command = str(error.value.hint).partition(": ")[2]
    command = command.replace("python ", f"{sys.executable} ")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    columns = read_columns(find_split(tmp_path, "train"))
    assert columns["text"] == [row["text"] for row in rows]


def test_a_folder_above_that_of_the_data(tmp_path: Path) -> None:
    folder = tmp_path / "my data" / "mails"
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text(TICKETS)
    with pytest.raises(UsageError, match="it has mails/") as error:
        find_split(folder.parent, "train")
    assert error.value.hint == f"mails/ has one: give '{folder}'"


def test_a_folder_of_one_file_under_another_name(tmp_path: Path) -> None:
    """The line that is advised makes it the training data; a validation file is none."""
    folder = tmp_path / "my data"
    folder.mkdir()
    (folder / "dev.csv").write_text(TICKETS)
    with pytest.raises(UsageError, match=r"it has dev\.csv") as error:
        find_split(folder, "train")
    assert str(error.value.hint).startswith("name it train.csv, .tsv, ")
    single = (folder / "dev.csv").rename(folder / "tickets.csv")
    with pytest.raises(UsageError, match=r"it has tickets\.csv") as error:
        find_split(folder, "train")
    command, _ = str(error.value.hint).split("; then give --validation-fraction 0.1")
    _, old, new = shlex.split(command.rpartition(": ")[2])
    assert Path(old) == single
    os.rename(old, new)
    assert find_split(folder, "train") == folder / "train.csv"


def test_a_model_that_is_nowhere_and_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder with a spelling mistake looks like an id of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    train = TrainConfig.resolve(task="synthetic", model="models/none")
    check_in_cache(train)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="'models/none' is no folder here and not in"):
        check_in_cache(train)
    (tmp_path / "models--models--none/snapshots/0").mkdir(parents=True)
    check_in_cache(train)
    with pytest.raises(UsageError, match="'models/other' is no folder"):
        configure({"task": "emotion", "model": "models/other", "data": "models/data"})


def test_data_that_is_nowhere_and_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    flags: dict[str, Any] = {"task": "text-classification", "model": str(tiny_model)}
    configure(flags | {"data": "data/tickets"})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="--data 'data/tickets' is no folder") as error:
        configure(flags | {"data": "data/tickets"})
    start = f"slurmft fetch {shlex.quote(str(tiny_model))} data/tickets --task text-"
    assert start in str(error.value.hint)
    # What was typed of how the data is read, and nothing of the recipe's.
    typed = {"text_column": "my text", "validation_fraction": 0.1, "mix": ("a/b:0.2",)}
    assert fetch_command(
        TrainConfig.resolve(**flags, data="data/tickets", **typed)
    ) == (
        f"{start}classification --mix a/b:0.2 --validation-fraction 0.1 "
        "--text-column 'my text'"
    )
    train = TrainConfig.resolve(task="squad", preset="v2", model=None)
    assert fetch_command(train).endswith("--task squad --preset v2")
    with pytest.raises(UsageError, match="--data 'rajpurkar/squad' is no folder here"):
        configure({"task": "squad", "model": str(tiny_model)})
    # As the datasets library names the folder of ada/MyTexts.
    for name in ("data___tickets", "ada___my_texts"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    configure(flags | {"data": "data/tickets"})
    configure(flags | {"data": "ada/MyTexts"})
    mixed = flags | {"data": "ada/MyTexts", "mix": ("data/ticket:0.2",)}
    with pytest.raises(UsageError, match="--mix 'data/ticket' is no folder") as error:
        configure(mixed)
    assert str(error.value.hint).endswith(" --mix data/ticket:0.2")


@pytest.mark.parametrize("column", ["weight", "sample_weights", "weight of a parcel"])
def test_weights_of_rows_that_nothing_reads_are_told(
    column: str, tmp_path: Path
) -> None:
    """Unless the column is the label, say."""
    rows = [{"text": f"text {n}", "label": n % 2, column: n} for n in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "train.jsonl").write_text(lines)
    (tmp_path / "validation.jsonl").write_text(lines)

    def remarks(**flags: str) -> list[str]:
        with recorded_warnings() as caught:
            configure({"data": str(tmp_path), "model": "a/model", **flags})
        texts = [str(each.message) for each in caught]
        return [text for text in texts if "nothing reads" in text]

    file = str(tmp_path / "train.jsonl")
    expected = (
        f"{file!r} has a column {column!r}, which nothing reads: each row counts once"
    )
    is_weight = "parcel" not in column
    assert remarks(task="text-classification") == [expected] * is_weight
    assert remarks(task="text-regression", label_column=column) == []


_PAIR = {"anchor": "a", "positive": "b"}
_PROMPT = {"prompt": "a", "completion": "b"}
_TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_CHAT = {"messages": _TURNS}


@pytest.mark.parametrize(
    ("task", "preset", "row", "column", "values", "advice"),
    [
        ("embeddings", "pairs", _PAIR, "negative", ["c"], "--preset triplets uses it"),
        ("embeddings", "pairs", _PAIR, "label", [0, 1], "--label-column label uses it"),
        ("embeddings", "pairs", _PAIR, "score", [0.5, 1], "--label-column score"),
        ("embeddings", "pairs", _PAIR, "label", [1, 1], None),
        ("sft", "completion", _PROMPT, "input", ["", "c"], "into the column 'prompt'"),
        ("sft", "completion", _PROMPT, "input", ["", ""], None),
        ("sft", "completion", _PROMPT, "history", [[], ["c"]], "the column 'prompt'"),
        ("sft", "chat", _CHAT, "images", [["a.png"]], "trained on text alone"),
        ("sft", "chat", _CHAT, "input", ["c"], None),
    ],
)
def test_columns_that_belong_to_what_is_read_are_told(
    task: str,
    preset: str,
    row: dict[str, Any],
    column: str,
    values: list[Any],
    advice: str | None,
    tmp_path: Path,
) -> None:
    """Rows of another program's, of which training would see a part."""
    lines = ""
    for number in range(40):
        lines += json.dumps(row | {column: values[number % len(values)]}) + "\n"
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(lines)
    with recorded_warnings() as caught:
        configure(
            {"task": task, "preset": preset, "data": str(tmp_path), "model": "a/model"}
        )
    texts = [str(each.message) for each in caught]
    told = [text for text in texts if f"has a column {column!r}, which" in text]
    assert len(told) == (advice is not None)
    assert (advice or "") in "".join(told)


@pytest.mark.parametrize(("most", "is_warned"), [(3, False), (4, False), (5, True)])
def test_max_steps_beyond_the_epochs_is_told(
    most: int, is_warned: bool, tmp_path: Path
) -> None:
    """40 rows in batches of 20, twice: the run ends after 4 steps."""
    rows = "".join(f"text {n},{n % 2}\n" for n in range(40))
    for split in ("train", "validation"):
        (tmp_path / f"{split}.csv").write_text(f"text,label\n{rows}")
    flags = {"task": "text-classification", "data": str(tmp_path), "model": "a/model"}
    with recorded_warnings() as caught:
        configure({**flags, "epochs": 2, "batch_size": 20, "max_steps": most})
    texts = " ".join(str(each.message) for each in caught)
    remark = f"--max-steps {most} has no effect: the run ends after --epochs 2, which are 4 step(s)"
    assert (remark in texts) == is_warned


def test_columns_that_nobody_reads_may_be_anything(tmp_path: Path) -> None:
    """As those without a name that a spreadsheet writes behind the table."""
    rows = "".join(f"text {n},{n % 2},,\n" for n in range(40))
    for split in ("train", "validation"):
        (tmp_path / f"{split}.csv").write_text(f"text,label,,\n{rows}")
    flags = {"task": "text-classification", "data": str(tmp_path), "model": "a/model"}
    with warnings.catch_warnings(record=True):
        assert configure(flags).program.inputs
