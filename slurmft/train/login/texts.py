"""What the texts of a split are like: how long they are, and which of them are there twice.

It needs neither torch nor numpy: `slurmft submit` and `slurmft data` look at files with it.
"""

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from slurmft.core.files import read_json
from slurmft.core.hub import hub_cache, is_local
from slurmft.train.login.formats import Text

SAMPLE, SAMPLE_CHARACTERS = 5000, 2_000_000
"""Texts of a split that are tokenized to look at their lengths, at most: about a second's work."""
_LONGEST = 5


class Lengths(NamedTuple):
    """How long texts are."""

    median: int
    p95: int
    longest: int

    @classmethod
    def of(cls, values: Iterable[int]) -> "Lengths":
        """Those of some texts, at least one."""
        found = sorted(values)
        return cls(found[len(found) // 2], found[int(0.95 * (len(found) - 1))], found[-1])

    def __str__(self) -> str:
        return f"median {self.median:,}, 95 % up to {self.p95:,}, longest {self.longest:,}"


@dataclass(slots=True)
class Texts:
    """The texts of a split, as far as they are counted."""

    words: "array[int]" = field(default_factory=lambda: array("L"))
    characters: "array[int]" = field(default_factory=lambda: array("L"))
    seen: set[int] = field(default_factory=set)
    """Hashes of all texts that are not empty: equal ones have equal hashes in this process."""
    repeated: int = 0
    """Texts that were there before, and are not empty."""
    sample: list[Text] = field(default_factory=list)
    """Some of them, each as likely as another."""
    longest: list[tuple[int, int, Text]] = field(default_factory=list)
    """Those with the most characters: characters, row, text."""
    _random: Random = field(default_factory=lambda: Random(0))

    def add(self, texts: Iterable[Any]) -> None:
        for each in texts:
            text: Text = each if isinstance(each, str | tuple) else str(each)
            whole = text if isinstance(text, str) else " ".join(text)
            row, size, key = len(self.words), len(whole), hash(text)
            self.words.append(len(whole.split()))
            self.characters.append(size)
            self.repeated += key in self.seen
            if self.words[-1]:
                self.seen.add(key)
            if row < SAMPLE:
                self.sample.append(text)
            elif (place := int(self._random.random() * (row + 1))) < SAMPLE:
                self.sample[place] = text
            heapq.heappush(self.longest, (size, row, text))
            if len(self.longest) > _LONGEST:
                heapq.heappop(self.longest)

    def token_counts(self, tokenizer: Any, prefix: str) -> tuple[list[int], int]:
        """Tokens of each text of a sample; and of the longest one of all, as far as characters
        tell which that is."""
        sample, characters = list[Text](), 0
        for text in Random(0).sample(self.sample, len(self.sample)):
            characters += len(text) if isinstance(text, str) else sum(map(len, text))
            if sample and characters > SAMPLE_CHARACTERS:
                break
            sample.append(text)
        counts = _count(tokenizer, sample, prefix)
        short = [text for size, _, text in self.longest if size < SAMPLE_CHARACTERS // _LONGEST]
        return counts, max([*counts, *_count(tokenizer, short, prefix)])


def _count(tokenizer: Any, texts: Sequence[Text], prefix: str) -> list[int]:
    with_prefix = [prefix + text if isinstance(text, str) else text for text in texts]
    return [len(encoding) for encoding in tokenizer.encode_batch(with_prefix)]


@dataclass(frozen=True, slots=True)
class LocalTokenizer:
    """A fast tokenizer that is on this machine."""

    tokenizer: Any
    most: int
    """Tokens that its model takes."""

    @classmethod
    def of(cls, model: str | None) -> "LocalTokenizer | None":
        """That of a model's folder, or of the hub's cache; None: there is none, or it is slow."""
        if model is None:
            return None
        folders = [Path(model)]
        if not is_local(model):
            cached = hub_cache() / f"models--{model.replace('/', '--')}" / "snapshots"
            folders = sorted(cached.glob("*"))
        files = [path for folder in folders if (path := folder / "tokenizer.json").is_file()]
        if not files:
            return None
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(files[-1]))
        except Exception:  # it raises no other type: the job says what is wrong with it
            return None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        said = read_json(files[-1].with_name("tokenizer_config.json")) or {}
        most = said.get("model_max_length")
        return cls(tokenizer, most if isinstance(most, int) else 2**62)
