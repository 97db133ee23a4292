"""A hook of mkdocs: the README is the site's first page, and links lead to what the site has."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

CHECKOUT = Path(__file__).resolve().parents[1]
ELSEWHERE = {"README.md": "index.md"} | {
    f"{d}/README.md": f"{d}.md" for d in ("results", "patches")
}
"""Page at home outside of docs/ -> its name on the site."""
_LINK = re.compile(r"\[((?:[^\]\[]|\[[^\]]*\])*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are at home elsewhere."""
    for source, page in ELSEWHERE.items():
        text = (CHECKOUT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Turns links of the repository into links of the site; those to what the site does not have
    into plain text."""
    homes = {page: source for source, page in ELSEWHERE.items()}
    home = posixpath.dirname(homes.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def on_site(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(home, target))
        name = ELSEWHERE.get(path, path.removeprefix("docs/"))
        is_there = path in ELSEWHERE or path.startswith("docs/")
        return f"[{text}]({name}{anchor})" if is_there else text

    return _LINK.sub(on_site, markdown)
