"""README.md and docs/*.md, taken apart: blocks, inline code, links, headings."""

from __future__ import annotations

import re

from tests.support import CHECKOUT

PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md")))
}
"""Page -> its text."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")


def texts() -> list[str]:
    return list(PAGES.values())


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; "": those of none, which show output."""
    return [
        found
        for text in texts()
        for name, found in _BLOCK.findall(text)
        if name == language
    ]


def block_that_begins(head: str, language: str = "") -> str:
    """The block of a language that begins with a text."""
    return next(text for text in blocks(language) if text.startswith(head))


def prose(text: str) -> str:
    """A page without its blocks."""
    return _BLOCK.sub("", text)


def inline(text: str) -> list[str]:
    """All inline code of a text, each on one line; dots of an omission stand for nothing."""
    return [
        " ".join(code.replace(" ...", " ").split())
        for code in _INLINE.findall(prose(text))
    ]


def links(text: str) -> list[str]:
    """Targets of the links and pictures that lead to no other site."""
    return re.findall(r"\]\((?!https?:)([^)]+)\)", text)


def anchors(text: str) -> set[str]:
    """What its headings are called in links, as GitHub does it."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings
    }


def lines(block: str) -> list[str]:
    """The lines of a block: continued ones joined, without comments and empty ones."""
    joined = re.sub(r"\s*\\\n\s*", " ", block)
    bare = (re.sub(r"(^|\s+)#\s.*", "", line) for line in joined.splitlines())
    return [line for line in bare if line]


def parts(line: str) -> list[str]:
    """The commands of a line."""
    return re.split(r" && |; ", line)
