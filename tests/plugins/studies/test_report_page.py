"""The page of a report, in a real browser without network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import HOSTILE as HOSTILE_NAME
from tests.conftest import slurmft
from tests.support import CHECKOUT, PATIENCE_S
from tests.support.made_runs import write_run

pytestmark = pytest.mark.extra("browser")

TITLE = "<script>alert(1)</script> \"quoted\" & 'so' $(rm) {{ 7 * 7 }}"


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Chromium, as Debian packages it."""
    found = shutil.which("chromium")
    if found is None and not request.config.getoption("--slurm"):
        pytest.skip("needs a browser: Debian's chromium")
    assert found is not None, "needs a browser: Debian's chromium"
    playwright = pytest.importorskip("playwright.sync_api")
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
    with playwright.sync_playwright() as running:
        made = running.chromium.launch(
            executable_path=found, args=sandbox, timeout=1000 * PATIENCE_S
        )
        yield made
        made.close()


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report of runs that finished, failed and go on, with hostile names, beside published."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("page") / HOSTILE_NAME
    for nodes in (1, 2, 4, 16):
        run = write_run(
            folder / "runs" / f"<b>{nodes}</b>", nodes=nodes, nproc_per_node=1, step_s=1 / nodes,
            state="failed" if nodes == 4 else "finished", model="<i>m</i>", task="emotion",
            submission={"command": "slurmft submit --comment '</details><script>x()</script>'"},
        )  # fmt: skip
        if nodes == 4:
            text = run.state.read_text()
            run.state.write_text(
                text.replace('"reason": ""', '"reason": "<u>no memory</u>"')
            )
    file = CHECKOUT / "results" / "published" / "mn4_emotion.json"
    output = folder / "out"
    paths = (str(folder / "runs"), "--published", str(file), "--output", str(output))
    done = slurmft("report", *paths, "--title", TITLE)
    assert done.code == 0, done.err
    return (output / "report.html").as_uri()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The page on a desktop; whatever it asks for besides itself, or complains of, is an error."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    context.set_default_timeout(1000 * PATIENCE_S)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on(
        "request",
        lambda request: wrong.append(request.url) if request.url != url else None,
    )
    page.goto(url)
    yield page
    context.close()
    assert [text for text in wrong if not text.startswith("data:")] == []


def column(page: Any, index: int) -> list[str]:
    """What a column of the first table shows."""
    found: list[str] = (
        page.locator("table")
        .first.locator(f"tbody td:nth-child({index})")
        .all_inner_texts()
    )
    return found


def test_hostile_names_are_text(page: Any) -> None:
    assert page.title() == TITLE
    assert page.locator("h1").inner_text() == TITLE
    assert page.locator("main script, main b, main i, main u").count() == 0
    assert "</details><script>x()</script>" in page.locator("main").inner_text()


def test_tables_sort_by_click_and_by_keyboard(page: Any) -> None:
    table = page.locator("table").first
    assert column(page, 1) == ["1", "2", "4", "16"]
    heads = table.locator("th")
    heads.first.locator("button").click()
    assert heads.first.get_attribute("aria-sort") == "ascending"
    heads.first.locator("button").click()
    assert column(page, 1) == ["16", "4", "2", "1"]  # as numbers, not as texts
    assert heads.first.get_attribute("aria-sort") == "descending"
    train = next(
        i
        for i, text in enumerate(heads.all_inner_texts())
        if text.startswith("train (s")
    )
    heads.nth(train).locator("button").focus()
    page.keyboard.press("Enter")
    assert heads.first.get_attribute("aria-sort") is None
    assert column(page, train + 1) == ["1.25", "10.00", "20.00", "n/a"]
    page.keyboard.press("Space")
    # nothing is last always
    assert column(page, train + 1) == ["20.00", "10.00", "1.25", "n/a"]


def test_failed_cells_are_visible(page: Any) -> None:
    cell = page.locator("td.bad").first
    assert cell.is_visible()
    assert cell.inner_text().startswith("failed: <u>no memory")


def test_plots_have_text_alternatives(page: Any) -> None:
    plots = page.locator("figure img")
    assert plots.count() >= 5
    for i in range(plots.count()):
        assert " by " in (plots.nth(i).get_attribute("alt") or "")
        assert (
            plots.nth(i).evaluate(
                "image => image.decode().then(() => image.naturalWidth)"
            )
            > 0
        )
    details = page.locator("figure details")
    assert details.count() == plots.count()
    details.first.locator("summary").click()
    assert details.first.locator("td").first.is_visible()


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_overflows(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for details in page.locator("details").all():
        details.evaluate("element => element.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_ids_are_there_once_and_links_lead_somewhere(page: Any) -> None:
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    links = page.evaluate(
        "[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))"
    )
    assert len(links) == 2
    assert set(links) <= set(ids)


def test_published_figures_and_doubts_are_there(page: Any) -> None:
    text = page.locator("main").inner_text()
    assert "0.9375" in text
    assert "doubt: accuracy collapses at 8 and 16 GPUs" in text
    assert "slurmft 0.1 0123456789" in text
