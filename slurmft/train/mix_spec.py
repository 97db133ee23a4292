"""Further sources of training data, as --mix names them: `/data/general:0.2`.

A hub id or a folder, after a colon its share of an epoch, and then options that say how its rows
are read where they differ from --data: `/data/chats:0.2,text_column=conversations`.

An epoch is one pass over the rows of --data, with as many rows of each source as make up its share.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from slurmft.core.errors import UsageError

# The first colon with a number behind it that ends the text or has options behind it: a path may
# have colons, and so may the value of an option.
_VALUE = re.compile(r"(.+?):(\d+\.?\d*|\.\d+)((?:,[a-z_]+=.*)?)")
_SHARE_AND_MORE = re.compile(r".+?:(?:\d+\.?\d*|\.\d+),(.*)")
# The value of an option may have commas itself: negatives of embeddings are several columns.
_BETWEEN_OPTIONS = re.compile(r",(?=[a-z_]+=)")
_FORM = "give ID|DIR:SHARE, as /data/general:0.2 for a fifth of each epoch"


@dataclass(frozen=True, slots=True)
class MixSpec:
    """One value of --mix."""

    name: str
    """Hub id, or path of a folder."""
    share_text: str
    """Its share of an epoch, as the user wrote it."""
    settings: dict[str, str] = field(default_factory=dict)
    """Options of its own, by their names."""

    @classmethod
    def parse(cls, text: str) -> "MixSpec":
        """Reads one value of --mix.

        Raises:
            UsageError: it does not have the form, or the share is none.
        """
        match = _VALUE.fullmatch(text)
        if match is None:
            raise _no_source(text)
        name, share_text, rest = match.groups()
        if not 0 < Fraction(share_text) < 1:
            problem = f"--mix {text!r}: the share {share_text} is not between 0 and 1"
            raise UsageError(problem, _FORM)
        settings: dict[str, str] = {}
        for part in _BETWEEN_OPTIONS.split(rest)[1:]:
            option, _, value = part.partition("=")
            if not value:
                raise UsageError(
                    f"--mix {text!r}: {option} has no value", f"write {option}=VALUE"
                )
            if option in settings:
                problem = f"--mix {text!r} has {option} twice"
                raise UsageError(problem, "leave one of them out")
            settings[option] = value
        return cls(name, share_text, settings)

    @property
    def text(self) -> str:
        """The value of --mix."""
        parts = [f"{self.name}:{self.share_text}"]
        for option, value in self.settings.items():
            parts.append(f"{option}={value}")
        return ",".join(parts)

    @property
    def share(self) -> Fraction:
        """Its share of an epoch, exactly as it is written: 0.1 is no binary number."""
        return Fraction(self.share_text)


def _no_source(text: str) -> UsageError:
    """Returns the error for a value of --mix that does not have the form."""
    match = _SHARE_AND_MORE.fullmatch(text)
    if match is None:
        return UsageError(f"--mix {text!r} does not end with a share", _FORM)
    return UsageError(
        f"--mix {text!r}: {match[1]!r} behind the share is no option",
        "write options as name=value, in small letters: text_column=conversations",
    )


def parsed(texts: Sequence[str]) -> list[MixSpec]:
    """Returns the sources that --mix names.

    Raises:
        UsageError: one of them does not have the form, two are the same, or nothing is left for
            --data.
    """
    specs: list[MixSpec] = []
    for text in texts:
        spec = MixSpec.parse(text)
        for other in specs:
            # A folder whose rows are read in another way is another source.
            if (other.name, other.settings) == (spec.name, spec.settings):
                problem = f"--mix {text!r} names a source that --mix has already"
                raise UsageError(problem, "give it once, with the sum of the shares")
        specs.append(spec)
    total = sum(spec.share for spec in specs)
    if total >= 1:
        raise UsageError(
            f"--mix: the shares add up to {float(total):g}, and nothing is left for --data",
            "give shares whose sum is below 1",
        )
    return specs


def draws(rows: int, specs: Sequence[MixSpec]) -> list[int]:
    """Returns how many rows of each source an epoch has, beside `rows` of --data.

    Each is rounded, to at least one row.
    """
    # The rows of --data are this share of an epoch, which so has rows / left in all.
    left = 1 - sum(spec.share for spec in specs)
    return [max(1, round(rows * spec.share / left)) for spec in specs]


def in_words(specs: Sequence[MixSpec], sizes: Sequence[int | None]) -> list[str]:
    """Returns what part of an epoch --data is, and each source: "20 % of each epoch, 100 rows".

    Args:
        sizes: number of rows of --data, and of each source; None: not known yet.
    """
    shares = [1 - sum(spec.share for spec in specs), *(spec.share for spec in specs)]
    parts = [f"{float(100 * share):g} % of each epoch" for share in shares]
    if sizes[0] is None:
        return parts
    counts = [sizes[0], *draws(sizes[0], specs)]
    texts = []
    for part, size, count in zip(parts, sizes, counts, strict=True):
        text = f"{part}, {count:,} rows"
        if size is not None and count > size:
            text += f", each {count / size:.3g} times"
        texts.append(text)
    return texts


def repeated(specs: Sequence[MixSpec], sizes: Sequence[int | None]) -> list[str]:
    """Returns a warning for each source of which an epoch has more rows than there are.

    Args:
        sizes: see `in_words`.
    """
    warnings: list[str] = []
    if sizes[0] is None:
        return warnings
    counts = draws(sizes[0], specs)
    for spec, size, count in zip(specs, sizes[1:], counts, strict=True):
        if size is not None and count > size:
            warnings.append(
                f"--mix {spec.text!r}: the source is repeated {count / size:.3g} times per epoch: "
                f"it has {size:,} rows, and its share is {count:,} (a smaller share, or more data)"
            )
    return warnings
