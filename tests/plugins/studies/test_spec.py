"""Study files: the cells that follow from them, and what is wrong with bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmft.core.errors import UsageError
from slurmft.plugins.studies import spec
from slurmft.plugins.studies.folder import keep_copies
from slurmft.plugins.studies.runner import configurations
from slurmft.train.config import TrainConfig
from tests.support import CHECKOUT

SHIPPED = sorted((CHECKOUT / "results" / "studies").glob("*.toml"))

HEAD = 'name = "s"\n'


def parse(text: str, folder: Path = Path("/x")) -> spec.Study:
    return spec.parse_study(HEAD + text, folder / "s.toml")


def test_cells_are_the_product_in_the_order_of_the_file() -> None:
    study = parse("[grid]\nnodes = [1, 2]\nprecision = ['fp32', 'bf16']\n")
    assert [spec.label(cell) for cell in study.cells] == [
        "nodes=1 precision=fp32",
        "nodes=1 precision=bf16",
        "nodes=2 precision=fp32",
        "nodes=2 precision=bf16",
    ]
    assert (study.repeats, study.at_most, study.retries) == (3, 1, 2)
    assert (study.title, study.scaling, study.published) == ("s", "none", None)


@pytest.mark.parametrize("cells_first", [False, True])
def test_explicit_cells_are_multiplied_with_the_grid(cells_first: bool) -> None:
    tables = [
        "[grid]\nbatch_size = [8, 16]\n",
        "[[cells]]\nnodes = 1\n[[cells]]\nnodes = 4\n",
    ]
    study = parse("".join(reversed(tables) if cells_first else tables))
    assert study.varied == (
        ["nodes", "batch_size"] if cells_first else ["batch_size", "nodes"]
    )
    assert {(c["nodes"], c["batch_size"]) for c in study.cells} == {
        (1, 8),
        (1, 16),
        (4, 8),
        (4, 16),
    }


def test_a_round_has_every_cell_before_the_next() -> None:
    study = parse("repeats = 2\n[grid]\nnodes = [1, 2]\n")
    assert [(r, c["nodes"]) for r, c in spec.rounds(study)] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]


def test_repeats_have_seeds_of_their_own(tmp_path: Path) -> None:
    study = parse(
        "[fixed]\nseed = 7\nlearning_rate = 1\n[grid]\nnodes = [1, 2]\n", tmp_path
    )
    found = configurations(study, tmp_path / "s")
    seeds = {
        (c.job.nodes, repeat): TrainConfig.of(c.program).seed
        for (_, repeat), c in found.items()
    }
    assert seeds == {(n, r): 6 + r for n in (1, 2) for r in (1, 2, 3)}
    config = found[spec.key_of({"nodes": 2}), 1]
    assert TrainConfig.of(config.program).learning_rate == 1.0
    assert config.job.job_name == "s"
    assert config.job.runs_dir == str(tmp_path / "s" / "runs")


def test_a_global_batch_is_divided_by_the_processes(tmp_path: Path) -> None:
    text = (
        "[fixed]\nglobal_batch_size = 64\nnproc_per_node = 2\n[grid]\nnodes = [1, 4]\n"
    )
    found = configurations(parse(text, tmp_path), tmp_path / "s")
    sizes = {c.job.nodes: TrainConfig.of(c.program).batch_size for c in found.values()}
    assert sizes == {1: 32, 4: 8}


def test_micro_steps_make_up_a_global_batch(tmp_path: Path) -> None:
    """With a batch size, too, both are those of the training."""
    text = "[fixed]\nglobal_batch_size = 64\nbatch_size = 8\n[grid]\nnodes = [1, 3]\n"
    found = configurations(parse(text, tmp_path), tmp_path / "s")
    for config in found.values():
        train = TrainConfig.of(config.program)
        assert (train.batch_size, train.global_batch_size) == (8, 64)


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ("nproc_per_node = 1", "cannot be divided by 3"),
        ("", "needs the number of processes"),
    ],
)
def test_a_global_batch_that_cannot_be_divided(
    fixed: str, words: str, tmp_path: Path
) -> None:
    text = f"[fixed]\nglobal_batch_size = 64\n{fixed}\n[grid]\nnodes = [3]\n"
    with pytest.raises(UsageError, match=f"the cell 'nodes=3' of s.toml: .*{words}"):
        configurations(parse(text, tmp_path), tmp_path / "s")


def test_site_file_and_repeatable_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.toml"
    site.write_text('setup = ["module load a"]\npartition = "gpu"\njob_name = "ours"\n')
    monkeypatch.setenv("SLURMFT_SITE", str(site))
    study = parse(
        "[grid]\nsetup = [['export X=1'], ['export X=2', 'true']]\n", tmp_path
    )
    jobs = [c.job for c in configurations(study, tmp_path / "s").values()]
    assert jobs[0].setup == ("module load a", "export X=1")
    assert jobs[1].setup == ("module load a", "export X=2", "true")
    assert (jobs[0].partition, jobs[0].job_name) == ("gpu", "ours")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[grid]\nnodse = [1]", "did you mean nodes"),
        ("[grid]\nnodes = []", "nodes must be a list of values, not []"),
        ("[grid]\nnodes = 4", "nodes must be a list of values, not 4"),
        ("[grid]\nnodes = [1, 'two']", "nodes must be a whole number, not 'two'"),
        ("[grid]\nnodes = [true]", "nodes must be a whole number, not True"),
        ("[grid]\nnodes = [1, 1]", "'nodes=1' occurs twice"),
        ("[grid]\nseed = [1, 2]", "varies seed"),
        ("[grid]\ncluster = ['local', 'slurm']", "varies cluster"),
        ("[grid]\nruns_dir = ['a']", "runs_dir = 'a' is not possible in a study"),
        ("[fixed]\nnodes = 1\n[grid]\nnodes = [1]", "[fixed] has nodes = 1"),
        ("[grid]\nbatch_size = ['all']", "must be a whole number or auto, not 'all'"),
        ("[grid]\nglobal_batch_size = [1.5]", "must be a whole number, not 1.5"),
        (
            "[grid]\nnodes = [1]\n[[cells]]\nnodes = 2",
            "is in both [grid] and [[cells]]",
        ),
        ("[[cells]]\nnodes = 1\n[[cells]]\nbatch_size = 1", "differ in their fields"),
        ("cells = [1]", "cells must be tables with values"),
        ("cells = []", "cells must be tables with values"),
        ("", "varies nothing"),
        ("[fixed]\nnodes = 1", "varies nothing"),
        (
            "[fixed]\nrepeats = 3\n[grid]\nnodes = [1]",
            "'repeats' is a key of the study itself",
        ),
        ("nodes = [1]", "'nodes' belongs to a table"),
        ("repeat = 3\n[grid]\nnodes = [1]", "did you mean repeats"),
        ("repeats = 0\n[grid]\nnodes = [1]", "repeats = 0 must be between 1 and 1,000"),
        (
            "repeats = '3'\n[grid]\nnodes = [1]",
            "repeats must be a whole number, not '3'",
        ),
        (
            "repeats = true\n[grid]\nnodes = [1]",
            "repeats must be a whole number, not True",
        ),
        ("retries = -1\n[grid]\nnodes = [1]", "retries = -1 must be between 0 and 100"),
        (
            "retries = 1000\n[grid]\nnodes = [1]",
            "retries = 1000 must be between 0 and 100",
        ),
        (
            "at_most = 1000000\n[grid]\nnodes = [1]",
            "at_most = 1000000 must be between 1 and 100,000",
        ),
        ("scaling = 'strnog'\n[grid]\nnodes = [1]", "did you mean strong"),
        ("title = 'a\\nb'\n[grid]\nnodes = [1]", "is not TOML"),
        ('title = "a\\nb"\n[grid]\nnodes = [1]', "is more than a line"),
        ("scaling = 'weak'\n[grid]\nnodes = [1]", "'weak' without max_steps"),
        (
            "scaling = 'weak'\n[fixed]\nglobal_batch_size = 8\n[grid]\nnodes = [1]",
            "that of all",
        ),
        (
            "scaling = 'strong'\n[fixed]\nmax_steps = 8\n[grid]\nnodes = [1]",
            "more work for more",
        ),
        ("[grid", "is not TOML"),
        ("[fixed]\n[grid]\na-b = [1]", "unknown key 'a-b'"),
    ],
)
def test_bad_files(text: str, words: str) -> None:
    if "\\n" in text and text.startswith("title = '"):
        text = text.replace("\\n", "\n")
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert str(caught.value).startswith("/x/s.toml")
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize("name", ["a/b", "..", "", "a b", "-a", "é", "x" * 64])
def test_names_that_are_no_folder(name: str) -> None:
    with pytest.raises(UsageError, match="is not a folder name"):
        spec.parse_study(f'name = "{name}"\n[grid]\nnodes = [1]\n', Path("s.toml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("repeats = 1_000_000_000\n[grid]\nnodes = [1, 2]", "between 1 and 1,000"),
        (f"repeats = 1000\n[grid]\nnodes = {[*range(1, 102)]}", "101,000 runs"),
        (
            "repeats = " + "9" * 5000 + "\n[grid]\nnodes = [1]",
            "is not TOML: Exceeds the limit",
        ),
        (
            "[grid]\nnodes = " + "[" * 3000 + "]" * 3000,
            "is not TOML: brackets within brackets",
        ),
    ],
)
def test_absurd_files_are_refused_at_once(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(text)


def test_a_million_cells_are_refused_at_once() -> None:
    many = "[" + ",".join(map(str, range(1, 1001))) + "]"
    with pytest.raises(UsageError, match="1,000,000 cells"):
        parse(f"[grid]\nnodes = {many}\nbatch_size = {many}\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[grid]\nprecision = ['fp32', 'fp12']",
            "the cell 'precision=fp12' of s.toml: ",
        ),
        (
            "[grid]\nbatch_size = [0]",
            "the cell 'batch_size=0' of s.toml: --batch-size 0 must",
        ),
        ("[grid]\nrecipe = ['mn5']", "unknown --recipe 'mn5'"),
        ("[fixed]\ntask = 'emotion'\n[grid]\ndata = ['/none']", "no such folder"),
    ],
)
def test_values_that_are_not_allowed(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        configurations(parse(text, tmp_path), tmp_path / "s")
    assert words in str(caught.value)
    assert "the cell '" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for given, words in (
        (tmp_path / "no.toml", "no such file"),
        (tmp_path, "holds no study.toml"),
    ):
        with pytest.raises(UsageError, match=words):
            spec.read_study(given)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(UsageError, match="cannot read the study file"):
        spec.read_study(tmp_path / "latin.toml")


def test_published_figures_that_cannot_be_read(tmp_path: Path) -> None:
    """They end a study before it begins; what is read of it later does without."""
    file = tmp_path / "s.toml"
    file.write_text(HEAD + "published = '../none.json'\n[grid]\nnodes = [1]")
    with pytest.raises(UsageError, match=r"s\.toml: cannot read published tables from"):
        spec.read_study(file)
    study = spec.read_study(file, with_published=False)
    assert study.published == tmp_path / "../none.json"


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_studies(file: Path, tmp_path: Path) -> None:
    study = spec.read_study(file)
    assert study.name == file.stem
    assert study.published is not None
    found = configurations(study, tmp_path / study.name)
    assert len(found) == len(study.cells) * study.repeats
    if study.name.startswith("lab-"):
        assert all(
            c.job.cpus_per_task == c.job.nproc_per_node == 1 for c in found.values()
        )


@pytest.mark.parametrize("name", ["icelake_glue", "icelake_glue.json"])
def test_published_figures_that_come_along(name: str, tmp_path: Path) -> None:
    """By their name, as `slurmft report` takes it; in the study's folder the copy counts."""
    file = tmp_path / "s.toml"
    file.write_text(f'{HEAD}published = "{name}"\n[grid]\nnodes = [1]')
    study = spec.read_study(file)
    assert study.published is not None
    assert study.published.name == "icelake_glue.json"
    folder = tmp_path / "s"
    folder.mkdir()
    keep_copies(study, folder)
    assert spec.read_study(folder).published == folder / "icelake_glue.json"


def test_every_published_table_has_a_study() -> None:
    named = {spec.read_study(file).published for file in SHIPPED}
    tables = (SHIPPED[0].parent.parent / "published").glob("*.json")
    assert {path.resolve() for path in named if path} == {
        path.resolve() for path in tables
    }
