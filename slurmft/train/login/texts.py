"""Lengths of the texts of a split, and which of them are there twice.

It needs neither torch nor numpy: `slurmft submit` and `slurmft data` look at files with it.
"""

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from slurmft.core.files import read_json
from slurmft.train.login.formats import Text
from slurmft.train.login.model_files import tokenizer_file

SAMPLE = 2000
"""Most texts of a split that are tokenized to look at their lengths."""
SAMPLE_CHARACTERS = 2_000_000
"""Most characters of them: about a second's work."""
_LONGEST = 5
"""Number of a split's longest texts that are kept."""
_NO_LIMIT = 2**62


class Lengths(NamedTuple):
    """Median, 95th percentile and maximum of the lengths of texts."""

    median: int
    p95: int
    longest: int

    @classmethod
    def of(cls, values: Iterable[int]) -> "Lengths":
        """Sums up the lengths of at least one text."""
        ordered = sorted(values)
        median = ordered[len(ordered) // 2]
        p95 = ordered[int(0.95 * (len(ordered) - 1))]
        return cls(median, p95, ordered[-1])

    def __str__(self) -> str:
        return (
            f"median {self.median:,}, 95 % up to {self.p95:,}, longest {self.longest:,}"
        )


@dataclass(slots=True)
class Texts:
    """Counts of the texts of a split, and a random sample of them."""

    apart: int = 1
    """Texts of a row that a model reads one by one; see `RowFormat.texts_apart`."""
    # An array has 8 bytes for a number, where a list has an object besides.
    words: "array[int]" = field(default_factory=lambda: array("L"))
    """Number of words of each text."""
    characters: "array[int]" = field(default_factory=lambda: array("L"))
    seen: set[int] = field(default_factory=set)
    """Hashes of all texts that are not empty: equal ones have equal hashes in this process."""
    keys: "array[int]" = field(default_factory=lambda: array("q"))
    """The same hashes, of each text."""
    repeated: int = 0
    """Number of texts that were there before, and are not empty."""
    sample: list[Text] = field(default_factory=list)
    """Some of the texts, each as likely as another."""
    longest: list[tuple[int, int, Text]] = field(default_factory=list)
    """The texts with the most characters: characters, row, text."""
    # Of a seed: who looks at the same file twice is told the same.
    _random: Random = field(default_factory=lambda: Random(0))

    def add(self, texts: Iterable[Any]) -> None:
        """Counts texts, or pairs of them."""
        row = len(self.words) // self.apart
        for each in texts:
            text: Text = each
            parts: Sequence[str] = (each,)
            if isinstance(each, tuple):
                parts = each
                if self.apart == 1:
                    parts = (" ".join(each),)
            elif not isinstance(each, str):
                # The format of a task of the user's own may let other values pass.
                text = str(each)
                parts = (text,)
            words = 0
            characters = 0
            for part in parts:
                words_of_part = len(part.split())
                words += words_of_part
                characters += len(part)
                self.words.append(words_of_part)
                self.characters.append(len(part))
            # Eight bytes in place of the text: a split may have millions.
            key = hash(text)
            if key in self.seen:
                self.repeated += 1
            if words:
                self.seen.add(key)
                self.keys.append(key)
            self._keep_some(row, text, characters)
            row += 1

    def _keep_some(self, row: int, text: Text, characters: int) -> None:
        """Keeps a uniform sample of the texts so far (reservoir sampling), and the longest ones."""
        if row < SAMPLE:
            self.sample.append(text)
        else:
            place = int(self._random.random() * (row + 1))
            if place < SAMPLE:
                self.sample[place] = text
        # The row tells texts of equal length apart in the heap.
        if len(self.longest) < _LONGEST:
            heapq.heappush(self.longest, (characters, row, text))
        elif characters > self.longest[0][0]:
            heapq.heapreplace(self.longest, (characters, row, text))

    def token_counts(self, tokenizer: Any, prefix: str) -> tuple[list[int], int]:
        """Counts tokens.

        Args:
            tokenizer: one of the tokenizers library.
            prefix: what comes before each text.

        Returns:
            Tokens of each text of a sample; and of the longest text of all, as far as characters
            tell which that is.
        """
        sample: list[Text] = []
        characters = 0
        # Shuffled: the budget of characters must not prefer the beginning of a file.
        shuffled = Random(0).sample(self.sample, len(self.sample))
        for text in shuffled:
            # At least one text is counted, however long it is: see below.
            if isinstance(text, str):
                characters += len(text)
            else:  # a pair
                characters += sum(map(len, text))
            if sample and characters > SAMPLE_CHARACTERS:
                break
            sample.append(text)
        counts = self._count_tokens(tokenizer, sample, prefix)
        # A text of many megabytes would take minutes.
        most_characters = SAMPLE_CHARACTERS // _LONGEST
        long_texts = []
        for size, _, text in self.longest:
            if size < most_characters:
                long_texts.append(text)
        counts_of_long = self._count_tokens(tokenizer, long_texts, prefix)
        return counts, max(counts + counts_of_long)

    def _count_tokens(
        self, tokenizer: Any, texts: Sequence[Text], prefix: str
    ) -> list[int]:
        inputs = list(texts)
        if self.apart > 1:
            inputs = [text for row in texts for text in row]
        for place, text in enumerate(inputs):
            if isinstance(text, str):  # a task with a prefix reads single texts
                inputs[place] = prefix + text
        return [len(encoding) for encoding in tokenizer.encode_batch(inputs)]


@dataclass(frozen=True, slots=True)
class LocalTokenizer:
    """A fast tokenizer that is on this machine."""

    tokenizer: Any
    most: int
    """Most tokens that its model takes."""

    @classmethod
    def of(cls, model: str | None) -> "LocalTokenizer | None":
        """Returns the tokenizer in a model's folder or the hub's cache; None: there is none, or it
        is slow."""
        if model is None:
            return None
        file = tokenizer_file(model)
        if file is None:
            return None
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception:  # it raises no other type: the job says what is wrong with it
            return None
        # A saved tokenizer may cut and pad, which would hide how long texts are.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = read_json(file.with_name("tokenizer_config.json")) or {}
        most = config.get("model_max_length")
        if not isinstance(most, int):
            most = _NO_LIMIT
        return cls(tokenizer, most)
