"""Schemes of labels of words: entities by their prefixes, as seqeval knows them, or plain tags."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_PREFIXED = re.compile(r"([BIOESLU])[-_](.+)")
OUTSIDE = "O"


class Tag(NamedTuple):
    """A label of a word, taken apart."""

    prefix: str
    """B, I, E, S or O: the place of the word in its entity; BILOU's L and U are E and S."""
    kind: str
    """Type of the entity; "" outside of all."""


Entity = tuple[str, int, int]
"""Type, first and last word."""


def tag_of(label: str) -> Tag | None:
    """Returns a label's prefix and type, as of `B-PER` or `B_PER`; None: it has no prefix."""
    if label == OUTSIDE:
        return Tag(OUTSIDE, "")
    match = _PREFIXED.fullmatch(label)
    if match is None:
        return None
    prefix, kind = match.groups()
    # By seqeval's names of the same places.
    prefix = {"L": "E", "U": "S"}.get(prefix, prefix)
    return Tag(prefix, kind)


def are_entities(names: Sequence[str]) -> bool:
    """Returns whether class names are those of a scheme of entities, and no plain tags, such as
    parts of speech."""
    tags = [tag_of(name) for name in names]
    if not all(tags):
        return False
    # O alone, or a tag set in which nothing begins an entity, has none to find.
    return any(tag and tag.kind for tag in tags)


def entities(labels: Sequence[str]) -> Iterator[Entity]:
    """Yields the entities of a text, as seqeval's default mode finds them.

    One begins with B- or S-, or with another prefix that nothing before it explains; I- and E- of
    its type continue it, and E- and S- end it. So it reads all schemes, IOB1 and IOE1, too.
    """
    begin = 0
    kind = ""  # of the entity under way
    has_ended = True
    # an O behind the last word ends what is under way
    for i, label in enumerate([*labels, OUTSIDE]):
        tag = tag_of(label) or Tag(OUTSIDE, "")
        continues = not has_ended and tag.kind == kind and tag.prefix in ("I", "E")
        if kind and not continues:
            yield kind, begin, i - 1
            kind = ""
        if tag.prefix in ("B", "I", "E", "S") and not kind:
            begin = i
            kind = tag.kind
        has_ended = tag.prefix in ("E", "S")


def scheme(names: Sequence[str], texts: Iterable[Sequence[str]]) -> str:
    """Returns the name of a scheme, as seqeval has it.

    Args:
        names: of all classes.
        texts: labels of the words of each text, which tell IOB1 from IOB2, and IOE1 from IOE2.
    """
    prefixes = {name[0] for name in names}
    if prefixes & {"L", "U"}:
        return "BILOU"
    if "S" in prefixes or {"B", "E"} <= prefixes:
        return "IOBES"
    if "E" in prefixes:
        # In IOE2 every entity ends with E; in IOE1 those alone that another one follows at once.
        return "IOE2" if _always(texts, -1, "E") else "IOE1"
    return "IOB2" if _always(texts, 0, "B") else "IOB1"


def _always(texts: Iterable[Sequence[str]], place: int, prefix: str) -> bool:
    """Returns whether each run of entities of one type has a prefix at its first or last word."""
    for labels in texts:
        tags = [tag_of(label) or Tag(OUTSIDE, "") for label in labels]
        for kind, first, last in entities(labels):
            word = (first, last)[place]
            if kind and tags[word].prefix != prefix:
                return False
    return True
