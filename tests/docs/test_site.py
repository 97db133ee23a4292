"""The documentation site: built strictly, with every link leading somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import slurmft
from tests.docs import pages
from tests.support import CHECKOUT, PATIENCE_S


class Seen(HTMLParser):
    """What a page links to and loads, and the names that it can be linked by."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.names |= {str(found[k]) for k in ("id", "name") if found.get(k)}
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        elif tag in ("img", "script", "link") and (
            target := found.get("src") or found.get("href")
        ):
            self.loads.append(str(target))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Seen]:
    """File of the site -> what it has."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(
        command,
        cwd=CHECKOUT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {
        file: Seen(file.read_text(encoding="utf-8")) for file in folder.rglob("*.html")
    }


def targets(site: dict[Path, Seen], of: str) -> Iterator[tuple[Path, str]]:
    """Page, and what it links to or loads of the site itself; the page of a missing address has
    links from the root of wherever the site lies."""
    for page, seen in site.items():
        if page.name != "404.html":
            for target in getattr(seen, of):
                if not urlsplit(target).scheme:
                    yield page, target


@pytest.mark.extra("docs")
def test_links_and_anchors(site: dict[Path, Seen]) -> None:
    found = list(targets(site, "links"))
    assert len(found) > 1000
    for page, target in found:
        parts = urlsplit(target)
        file = (
            page.parent.joinpath(unquote(parts.path)).resolve() if parts.path else page
        )
        file = file / "index.html" if file.is_dir() else file
        assert file.exists(), f"{page}: {target}"
        if parts.fragment and file in site:
            names = site[file].names | {"__top"}
            assert unquote(parts.fragment) in names, f"{page}: {target}"


@pytest.mark.extra("docs")
def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Seen]) -> None:
    """Whoever reads the site tells no third party so; it works without network."""
    for page, seen in site.items():
        assert not [target for target in seen.loads if urlsplit(target).netloc], page
    for page, target in targets(site, "loads"):
        assert page.parent.joinpath(urlsplit(target).path).resolve().exists(), target
    assert "http" not in re.sub(
        r'xmlns(:\w+)?="[^"]*"|<!--.*?-->',
        "",
        (CHECKOUT / "docs/images/watch.svg").read_text(),
    )


@pytest.mark.extra("docs")
def test_every_page_is_there(site: dict[Path, Seen]) -> None:
    names = {page.parent.name for page in site}
    assert {page.stem for page in pages.PAGES if page.name != "README.md"} <= names


@pytest.mark.extra("docs")
def test_api_has_all_public_names(site: dict[Path, Seen]) -> None:
    names = next(seen.names for page, seen in site.items() if page.parent.name == "api")
    for name in slurmft.__all__:
        assert any(anchor.rpartition(".")[2] == name for anchor in names), name
    for method in ("wait", "cancel", "resume", "logs"):
        assert f"slurmft.api.Run.{method}" in names


def test_links_to_other_sites_are_well_formed() -> None:
    """They are not followed: tests need no network."""
    found = [
        link
        for text in pages.texts()
        for link in re.findall(r"\]\((https?:[^)]*)\)", text)
    ]
    assert found
    for link in found:
        assert re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[\w./#@~-]*)?", link), link
