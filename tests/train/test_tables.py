"""Tables that a machine makes: read as csv, pandas and pyarrow read them, or refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]
import pyarrow
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from slurmft.core.errors import UsageError
from slurmft.train.login import rows
from slurmft.train.login.rows import cure_of_words, read_columns, write_rows
from slurmft.train.login.sources import find_split

PARTS = (
    "a",
    "é",
    "日本",
    "🙂",
    " ",
    '"',
    '""',
    ",",
    "\t",
    "\n",
    "\r\n",
    "\r",
    "'",
    "\\",
)
NAMES = ["text", "label", "note"]


def cells(
    rng: random.Random, without: str = "", most: int = len(NAMES)
) -> list[list[str]]:
    """Rows of cells, of which none is blank as a whole."""
    parts = [part for part in PARTS if not set(part) & set(without)]
    table = []
    for number in range(rng.randint(1, 12)):
        row = ["".join(rng.choices(parts, k=rng.randint(0, 6))) for _ in range(most)]
        table.append([*row[:-1], f"{number}{row[-1]}"])
    return table


def found(path: Path) -> list[list[str]]:
    """The names of the columns and the rows of a file; none where nothing tells what is a row."""
    try:
        columns = read_columns(path)
    except UsageError as error:
        if "may be two rows, or one" in error.message:
            return []
        raise
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]


def as_csv(text: str, separator: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    return list(filter(None, reader))


@pytest.mark.parametrize("block", [32, 2**20])
def test_tables_are_read_as_csv_reads_them(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any quotes, ends of lines and separators; whatever is read at a time."""
    monkeypatch.setattr(rows, "_BLOCK_BYTES", block)
    rng = random.Random(block)
    for _ in range(60):
        separator = rng.choice(",\t")
        end = rng.choice(["\n", "\r\n", "\r"])
        quoting: Any = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        written = io.StringIO(newline="")
        writer = csv.writer(
            written, delimiter=separator, lineterminator=end, quoting=quoting
        )
        writer.writerow(NAMES)
        # What csv writes without quotes, and does not read again.
        without = "\r\n".replace(end, "")
        table = cells(rng, without)
        writer.writerows(table)
        text = written.getvalue()
        if rng.random() < 0.3:
            text = text.removesuffix(end)
        content = text.encode(rng.choice(["utf-8", "utf-8-sig"]))
        path = tmp_path / rng.choice(["train.csv", "train.csv.gz"])
        if path.suffix == ".gz":
            content = gzip.compress(content)
        path.write_bytes(content)
        in_file = found(path)
        if separator == "," or quoting == csv.QUOTE_ALL or in_file:
            assert in_file == as_csv(text, separator) == [NAMES, *table]


def test_tabs_without_quotes(tmp_path: Path) -> None:
    """As GLUE's files: no row is merged with the next, and no quote lost where it is one."""
    rng = random.Random(0)
    plain = 0
    for _ in range(150):
        width = rng.randint(1, 3)
        table = [NAMES[:width], *cells(rng, "\t\r\n", width)]
        text = "".join("\t".join(row) + "\n" for row in table)
        path = tmp_path / "train.tsv"
        path.write_text(text)
        in_file = found(path)
        plain += in_file == table
        if in_file not in ([], table):
            # Every quote is closed at the end of its cell, in its line.
            assert in_file == as_csv(text, "\t")
            assert len(in_file) == len(table)
    assert plain > 100


@pytest.mark.parametrize("ending", [".tsv", ".csv", ".tsv.gz"])
def test_a_quote_that_begins_a_cell(ending: str, tmp_path: Path) -> None:
    """csv and pandas take the three rows for one."""
    text = 'text\tlabel\n"Yes," he said\t1\n"It is\t0\nso\t1\nhe said"\t0\nok\t1\n'
    content = text.encode()
    if ending.endswith(".gz"):
        content = gzip.compress(content)
    path = tmp_path / f"train{ending}"
    path.write_bytes(content)
    texts = ['"Yes," he said', '"It is', "so", 'he said"', "ok"]
    assert read_columns(path) == {"text": texts, "label": ["1", "0", "1", "0", "1"]}


def test_quotes_around_several_lines(tmp_path: Path) -> None:
    """Nothing tells one row from two; the file that predictions are written into says it."""
    path = tmp_path / "new.tsv"
    path.write_text('text\tlabel\n"a\tb\nc"\td\n')
    with pytest.raises(UsageError, match=r"may be two rows, or one"):
        read_columns(path)
    columns = {"text": ["a\tb\nc", "x"], "label": ["d", "e"]}
    write_rows(path, columns)
    assert read_columns(path) == columns


def test_blank_lines(tmp_path: Path) -> None:
    """pandas leaves them out as well; of a single column, blanks are a cell."""
    path = tmp_path / "train.csv"
    path.write_text(" \n\ntext,label\na,1\n  \n\nb,2\n \n")
    assert read_columns(path) == {"text": ["a", "b"], "label": ["1", "2"]}
    path.write_text("text\na\n \n\nb\n")
    assert read_columns(path) == {"text": ["a", " ", "b"]}


def test_long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is divided into two rows; a plain text may be one line."""
    monkeypatch.setattr(rows, "_BLOCK_BYTES", 16)
    monkeypatch.setattr(rows, "_LINE_BYTES", 64)
    text = "日本語 🙂 " * 30
    for ending, content in (("csv", f"text\n{text}\n"), ("jsonl", json.dumps([text]))):
        path = tmp_path / f"train.{ending}"
        path.write_text(content)
        with pytest.raises(UsageError, match="has a line of more than"):
            read_columns(path)
    path = tmp_path / "train.txt"
    path.write_text(text)
    assert "".join(read_columns(path, ["text"])["text"]) == text


@pytest.mark.parametrize(
    ("name", "content", "what", "cure"),
    [
        ("train.csv.gz", b"text,label\n", "is no .gz", "mv "),
        (
            "train.csv.gz",
            gzip.compress(b"PK\x03\x04", mtime=0),
            "is a spreadsheet",
            "CSV",
        ),
        ("train.csv", b"\xff,\0a\n" + b"a" * 99, "is no text: line 1", "CSV"),
        # One letter of another script is no sign of Windows-1252.
        ("train.csv", "text,ى\n".encode("utf-16-le"), "but UTF-16LE", "iconv"),
    ],
)
def test_files_of_other_kinds(
    name: str, content: bytes, what: str, cure: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=what) as caught:
        read_columns(path)
    assert cure in (caught.value.hint or "")


ROWS = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
SQUAD = {"id": "1", "question": "q", "context": "c d"}
ANSWERS = [{"text": "c", "answer_start": 0}, {"text": "d", "answer_start": 2}]
ARTICLE = {
    "title": "t",
    "paragraphs": [
        {"context": "c d", "qas": [{"id": "1", "question": "q", "answers": ANSWERS}]}
    ],
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("content", "rows_of_it"),
    [
        (json.dumps(ROWS, indent=2), ROWS),
        (json.dumps({"data": ROWS}), ROWS),
        (pandas.DataFrame(ROWS).to_json(), ROWS),
        ("\n".join(map(json.dumps, ROWS)), ROWS),
        (
            "\ufeff" + json.dumps({"version": "1.1", "data": [ARTICLE]}),
            [SQUAD | {"answers": {"text": ["c", "d"], "answer_start": [0, 2]}}],
        ),
    ],
)
@pytest.mark.parametrize("ending", ["json", "ndjson"])
def test_cure_of_json_works_as_typed(
    ending: str, content: str, rows_of_it: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / f"train.{ending}").write_text(content)
    with pytest.raises(UsageError) as caught:
        find_split(tmp_path, "train")
    _, _, command = (caught.value.hint or "").partition(": ")
    command = command.replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(["bash", "-c", command], check=True)
    columns = read_columns(find_split(tmp_path, "train"))
    assert pandas.DataFrame(columns).to_dict("records") == rows_of_it


CONLL = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
"German" JJ B-NP B-MISC

Peter_B. NNP B-NP B-PER
"""
WORD_ROWS = [
    {"tokens": ["EU", "rejects", '"German"'], "tags": ["B-ORG", "O", "B-MISC"]},
    {"tokens": ["Peter_B."], "tags": ["B-PER"]},
]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.conll", CONLL),
        ("train.txt", CONLL.replace("\n", "\r\n")),
        ("train.tsv", CONLL.replace(" ", "\t")),
        ("train.csv", CONLL.replace(" ", "\t")),
        ("train.bio", "# id 1\n" + CONLL.replace(" ", "\t") + "\n\n"),
    ],
)
def test_cure_of_words_works_as_typed(name: str, content: str, tmp_path: Path) -> None:
    """A word a line, as CoNLL's files have it."""
    (tmp_path / name).write_bytes(content.encode())
    with pytest.raises(UsageError) as caught:
        read_columns(find_split(tmp_path, "train"), ("tokens", "tags"))
    _, _, command = (caught.value.hint or "").partition(": ")
    command = command.replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(["bash", "-c", command], check=True)
    columns = read_columns(find_split(tmp_path, "train"))
    assert pandas.DataFrame(columns).to_dict("records") == WORD_ROWS


@pytest.mark.parametrize(
    "content", ["a b\nc\n", "once upon a time\nthere was\n", "a O\n\nb x\n"]
)
def test_other_texts_are_not_taken_for_words(content: str, tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    file.write_text(content)
    assert not cure_of_words(file)
    assert read_columns(file, ("text",))["text"] == [content]


def test_types_of_a_parquet_stay(tmp_path: Path) -> None:
    """Of a file with predictions: its columns, index and classes are as they were."""
    frame = pandas.DataFrame(
        {
            "text": ["a", "b"],
            "when": pandas.to_datetime([1, 2], unit="ns"),
            "size": pandas.array([1, 2], "int8"),
            "kind": pandas.Categorical(["x", "y"]),
        },
        index=pandas.RangeIndex(0, 4, 2),
    )
    features = Features(
        {"text": Value("string"), "label": ClassLabel(names=["n", "p"])}
    )
    classes = Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features)
    pairs = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    maps = pyarrow.table({"text": ["a"], "map": pyarrow.array([[("k", 1)]], pairs)})
    source = tmp_path / "new.parquet"
    output = tmp_path / "out.parquet"
    for write in (
        frame.to_parquet,
        classes.to_parquet,
        lambda path: pyarrow.parquet.write_table(maps, path),
    ):
        write(source)
        columns = read_columns(source)
        rows.check_writable(columns, output, str(source))
        added = {"prediction": [0.5] * len(columns["text"])}
        write_rows(output, columns | added, source)
        expected = pyarrow.parquet.read_table(source)
        table = pyarrow.parquet.read_table(output)
        assert table.drop_columns("prediction").equals(expected)
        assert table.schema.metadata == expected.schema.metadata
        assert table["prediction"].to_pylist() == added["prediction"]
    frame.to_parquet(source)
    write_rows(output, read_columns(source) | {"prediction": [1, 2]}, source)
    expected_frame = frame.assign(prediction=[1, 2])
    pandas.testing.assert_frame_equal(pandas.read_parquet(output), expected_frame)
