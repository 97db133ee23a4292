"""What the pages name is there: links, modules, messages, settings; and the drawing is true."""

from __future__ import annotations

import ast
import functools
import html
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import slurmft
from slurmft.core import plugins, site
from slurmft.plugins.remote import clusters
from slurmft.plugins.studies import spec
from slurmft.train.login.configure import OPTIONS
from tests.docs import pages
from tests.docs.pages import PAGES
from tests.docs.rules import study_name
from tests.support import CHECKOUT

README = CHECKOUT / "README.md"
TROUBLESHOOTING = CHECKOUT / "docs/troubleshooting.md"
DRAW = CHECKOUT / "docs/draw_architecture.py"
OF_OTHERS = {"CUDA out of memory"}
"""Messages that are not slurmft's."""
GROUPS = {
    v for v in vars(plugins).values() if isinstance(v, str) and v.startswith("slurmft.")
}
"""Groups of entry points, which are no modules."""


# --- the pages themselves -------------------------------------------------------------------------


def test_readme_is_short_and_whole() -> None:
    """At most 250 lines, with every command, and a link to every page."""
    text = PAGES[README]
    assert len(text.splitlines()) <= 250
    named = set(re.findall(r"`slurmft (\w+)", text))
    # what jobs call
    assert plugins.entries(plugins.COMMANDS).keys() - named == {"prepare"}
    assert {f"docs/{page.name}" for page in PAGES if page != README} <= set(
        pages.links(text)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    """Files and headings that a page links to are there."""
    for target in pages.links(PAGES[page]):
        file, _, anchor = target.partition("#")
        found = page.parent.joinpath(file).resolve() if file else page
        assert found.exists(), target
        assert not anchor or anchor in pages.anchors(PAGES[found]), target


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p != README], ids=lambda page: page.name
)
def test_page_begins_with_its_question(page: Path) -> None:
    """And the README's index has it, too."""
    title, question, *_ = [line for line in PAGES[page].splitlines() if line]
    assert re.fullmatch(r"# .+", title)
    assert re.fullmatch(r"\*.+\?\*", question)
    row = rf"^\|[^|]*\]\(docs/{page.name}\)"
    assert re.search(row, PAGES[README], re.MULTILINE)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p != README], ids=lambda page: page.name
)
def test_page_answers_its_question_first(page: Path) -> None:
    """Behind the question stands a paragraph: no heading, table, list or code."""
    _, _, answer, *_ = PAGES[page].split("\n\n")
    assert re.match(r"[A-Za-z\[`*]", answer)
    assert not re.match(r"```|\* |- ", answer)


def test_ci_runs_the_test_command() -> None:
    """.ci/run takes it from the README."""
    pattern = re.search(
        r"sed -n '/(.+)/p' README.md", (CHECKOUT / ".ci/run").read_text()
    )
    assert pattern
    assert len([x for x in PAGES[README].splitlines() if re.search(pattern[1], x)]) == 1


# --- what they name -------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_are_there(page: Path) -> None:
    """slurmft.node.task, node/task.py, tests/docs/: in inline code."""
    words = [word for code in pages.inline(PAGES[page]) for word in code.split()]
    dotted = {w for w in words if re.fullmatch(r"slurmft(\.[a-z_]+)+(\(\))?;?", w)}
    files = {w for w in words if re.fullmatch(r"([a-z_]+/)+[a-z_]+\.py:?", w)}
    files |= {w for w in words if re.fullmatch(r"(tests|results|train)/([a-z_]+/)*", w)}
    tops = (CHECKOUT, CHECKOUT / "slurmft")
    absent = {name for name in dotted if not is_there(name.rstrip("();"))}
    absent |= {
        f for f in files if not any((top / f.rstrip(":")).exists() for top in tops)
    }
    assert not absent - GROUPS


def is_there(name: str) -> bool:
    """Whether slurmft.a.b is a module, or defined in one."""
    place = CHECKOUT
    for part in name.split("."):
        if (place / part).is_dir():
            place = place / part
        elif (place / f"{part}.py").is_file():
            place = place / f"{part}.py"
        else:
            source = place / "__init__.py" if place.is_dir() else place
            return part in slurmft.__all__ or f"def {part}(" in source.read_text()
    return True


@functools.cache
def literals() -> str:
    """All texts in slurmft's code and templates; of f-strings what stands between the values."""
    trees = [
        ast.parse(file.read_text()) for file in (CHECKOUT / "slurmft").rglob("*.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    found = (node.value for node in nodes if isinstance(node, ast.Constant))
    templates = [
        file.read_text()
        for ending in ("jinja", "template")
        for file in (CHECKOUT / "slurmft").rglob(f"*.{ending}")
    ]
    return "\n".join([*(text for text in found if isinstance(text, str)), *templates])


def quoted() -> list[str]:
    """The messages of the first column of the tables of troubleshooting."""
    rows = re.findall(r"^\| (.+?) \|", PAGES[TROUBLESHOOTING], re.MULTILINE)
    codes = [code for row in rows for code in pages.inline(row)]
    return [code for code in codes if fixed_words(code) and code not in OF_OTHERS]


def fixed_words(message: str) -> list[str]:
    """Three words in a row that look like no values (12, 'x', n4, SIGKILL), wherever there are."""
    runs = re.split(r"\.\.\.|[:,;()] ?|\S*[\d'=]\S*|\b(?:[A-Z]{3,}|nan)\b", message)
    words = [run.split() for run in runs]
    return [" ".join(run[i : i + 3]) for run in words for i in range(len(run) - 2)]


@pytest.mark.parametrize("message", quoted())
def test_messages_are_slurmfts_own(message: str) -> None:
    """Whoever changes a message changes its row in troubleshooting. Values may look like words."""
    words = fixed_words(message)
    assert len([w for w in words if w in literals()]) >= len(words) / 2


@pytest.mark.parametrize("block", pages.blocks("toml"))
def test_toml(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a study file, all keys are those of a study; of a site file, all are options; of the file
    that names clusters, all are theirs; of a pyproject.toml, all are groups of entry points."""
    (tmp_path / "file.toml").write_text(block)
    if block.startswith("[juwels]"):
        monkeypatch.setenv("SLURMFT_CLUSTERS", str(tmp_path / "file.toml"))
        assert [c.name for c in clusters.named("all")] == list(tomllib.loads(block))
        assert clusters.named("juwels")[0].site.keys() <= OPTIONS.keys()
    elif block.startswith("[project.entry-points"):
        assert tomllib.loads(block)["project"]["entry-points"].keys() <= GROUPS
    elif study_name(block):
        assert spec.read_study(str(tmp_path / "file.toml")).cells
    else:
        monkeypatch.setenv("SLURMFT_SITE", str(tmp_path / "file.toml"))
        # Where tests run, as in a container, nobody need have logged in.
        monkeypatch.setenv("USER", "ada")
        assert site.site_defaults(OPTIONS).keys() == tomllib.loads(block).keys()


def test_pip() -> None:
    """What pip is told to install, and the file of versions, are there."""
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    whole = "\n".join(pages.texts())
    named = re.findall(r"pip install [^`&\n]*\[([a-z]+)\]", whole)
    assert named
    assert set(named) <= extras["optional-dependencies"].keys()
    for file in re.findall(r"pip install [^`&\n]*-c (\S+)", whole):
        assert (CHECKOUT / file).exists()


# --- the drawing ----------------------------------------------------------------------------------


def draw(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRAW), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.processes
def test_drawing_is_true() -> None:
    done = draw("--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_drawing_shows_contract_and_code(tmp_path: Path) -> None:
    """Layers, purposes, sizes and imports; `--check` sees what is no longer so."""
    (tmp_path / "docs").mkdir()
    contract = (
        'type = "layers"\ncontainers = ["house"]\nlayers = ["roof | attic", "cellar"]\n'
    )
    text = f"[[tool.importlinter.contracts]]\n{contract}"
    (tmp_path / "pyproject.toml").write_text(text)
    for name, source in {
        "house/__init__.py": "",
        "house/roof/__init__.py": '"""Keeps <rain> out.\n\nMore.\n"""\n',
        "house/roof/tiles.py": "def lay() -> None:\n    import house.cellar\n",
        "house/attic.py": "from house import cellar\n",
        "house/cellar/__init__.py": '"""Holds `wine`."""\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    root = ("--root", str(tmp_path))
    assert draw(*root, "--check").returncode == 1
    assert draw(*root).returncode == draw(*root, "--check").returncode == 0
    drawn = (tmp_path / "docs/architecture.svg").read_text()
    boxes = re.findall(r"<text x[^>]*>([^<]*)</text>", drawn)
    assert boxes[:3] == ["roof", "Keeps &lt;rain&gt; out", "2 modules · imports cellar"]
    assert boxes[3:5] == ["attic", "1 module · imports cellar"]
    assert boxes[5:8] == ["cellar", "Holds wine", "1 module · imports nothing"]
    (tmp_path / "house/roof/gutter.py").touch()
    assert draw(*root, "--check").returncode == 1


# --- what others read -----------------------------------------------------------------------------


def test_citation() -> None:
    """What GitHub and Zenodo read; `cffconvert --validate` finds it valid."""
    found = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    # what CFF asks for
    assert found.keys() >= {"cff-version", "message", "title", "authors"}
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert (found["title"], found["license"]) == (project["name"], project["license"])
    assert found["authors"] == project["authors"]


def test_screens_of_a_run_show_its_losses() -> None:
    """That of the training, and that of an evaluation beside its metrics."""
    for name in ("running.md", "images/watch.svg"):
        page = (CHECKOUT / "docs" / name).read_text()
        text = html.unescape(re.sub(r"<[^>]+>", "", page))
        screen = "".join(text.split())
        assert re.search(r"loss0\.\d+█", screen), name
        assert re.search(r"metricsaccuracy0\.\d+loss0\.\d+afterepoch", screen), name
