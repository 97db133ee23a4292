"""Dataclasses from JSON that somebody may have damaged, or another version has written.

`read` and `decode` check every field against its annotation: str, int, float, bool, None, Any,
unions, lists, tuples, dictionaries with keys of text, `Annotated[int, range(...)]`, dataclasses and
`TypedDict`. A field that is absent takes its default. Keys that are no fields are ignored.
"""

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeAlias, TypeVar

from slurmft.core.files import is_measurement, is_number, parse_json, read_text

T = TypeVar("T")
Decoder = Callable[[Any], Any]

NullIsNaN: TypeAlias = Annotated[float, "null is NaN"]
"""A number as the toolkit writes it: JSON has no NaN, and null in its place. Unlike None, which
stands for a field that is absent."""
Measurement: TypeAlias = Annotated[float | None, "null is NaN, or too large"]
"""A number that a program has measured. NaN and what is too large to calculate with are None: they
hide no other measurement beside them."""
_LARGEST_MEASUREMENT = 1e100
"""Its square, and sums of such, are finite."""


class DecodeError(ValueError):
    """A JSON value does not have the type that it must have."""


def read(path: Path, kind: type[T]) -> T | None:
    """Reads a JSON file as a dataclass; None where it is absent or damaged."""
    try:
        return load(path, kind)
    except (OSError, ValueError):
        return None


def load(path: Path, kind: type[T]) -> T:
    """Reads a JSON file as a dataclass.

    Raises:
        OSError: it is absent, cannot be read, is no regular file or too large.
        ValueError: it is no JSON, or does not fit the dataclass.
    """
    return loads(read_text(path), kind)


def loads(text: str | bytes, kind: type[T]) -> T:
    """Decodes JSON text as a dataclass.

    Raises:
        ValueError: the text is no JSON, or does not fit the dataclass.
    """
    return decode(parse_json(text), kind)


def decode(value: Any, kind: type[T]) -> T:
    """Decodes a value of JSON as `kind`, a type or the annotation of one; raises DecodeError."""
    decoder: Decoder = _decoder(kind)  # type: ignore[arg-type]  # types can be hashed
    decoded: T = decoder(value)
    return decoded


def decode_or_none(value: Any, kind: type[T]) -> T | None:
    """Decodes a value of JSON as `kind`; None where it does not fit."""
    try:
        return decode(value, kind)
    except DecodeError:
        return None


def matches(value: Any, kind: Any) -> bool:
    """Returns whether a value of JSON fits a type."""
    decoder: Decoder = _decoder(kind)
    try:
        decoder(value)
    except DecodeError:
        return False
    return True


def decode_leniently(value: Any, kind: type[T]) -> T:
    """Decodes what fits: of fields that are absent or damaged, the dataclass has the defaults."""
    fields = {}
    if isinstance(value, dict):
        decoders: dict[str, Decoder] = _field_decoders(kind)  # type: ignore[arg-type]
        for name, decoder in decoders.items():
            if name in value:
                try:
                    fields[name] = decoder(value[name])
                except DecodeError:
                    continue
    return kind(**fields)


@functools.cache
def _decoder(kind: Any) -> Decoder:
    """Builds the function that decodes one type, once in a process."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if kind is Any or kind is object:
        return _anything
    # Optional[X] is of the one kind, X | None of the other.
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    # Before all other Annotated types: what it is annotated with is no range.
    if kind == NullIsNaN:
        return _number_or_nan
    if kind == Measurement:
        return _measurement
    if origin is Annotated:
        return _bounded(*arguments)
    # Tuples are tuple[X, ...]: the second argument is the dots.
    if origin is list or origin is tuple:
        return _sequence(origin, arguments[0])
    # JSON has no keys but text.
    if origin is dict:
        return _mapping(arguments[1])
    # It may be absent; a value that is there must fit.
    if origin is NotRequired:
        return _decoder(arguments[0])
    if dataclasses.is_dataclass(kind):
        return _object(kind, _required_fields(kind))
    if typing.is_typeddict(kind):
        return _object(kind, kind.__required_keys__)
    # Numbers, str, bool, and NoneType as a part of a union.
    return _scalar(kind)


def _anything(value: Any) -> Any:
    return value


def _scalar(kind: Any) -> Decoder:
    if kind in (int, float):
        return _number(kind)

    def decode_scalar(value: Any) -> Any:
        if not isinstance(value, kind):
            # reprlib: a value that does not fit may be of any size.
            raise DecodeError(f"{reprlib.repr(value)} is no {kind.__name__}")
        return value

    return decode_scalar


def _number(kind: type[int] | type[float]) -> Decoder:
    """Numbers are finite and fit into 64 bits; true and false are none."""
    # A whole number fits a field of floats, too: JSON has 1 for 1.0.
    kinds = (int, kind)

    def decode_number(value: Any) -> Any:
        if not is_number(value) or not isinstance(value, kinds):
            raise DecodeError(f"{reprlib.repr(value)} is no {kind.__name__}")
        return value

    return decode_number


def _measurement(value: Any) -> Any:
    if value is None:
        return None
    if not is_measurement(value):
        raise DecodeError(f"{reprlib.repr(value)} is no number")
    # NaN is not below it either.
    if not abs(value) < _LARGEST_MEASUREMENT:
        return None
    return value


def _number_or_nan(value: Any) -> Any:
    measurement = _measurement(value)
    if measurement is None:
        return math.nan
    return measurement


def _bounded(kind: Any, bounds: range) -> Decoder:
    decode_number = _decoder(kind)

    def decode_bounded(value: Any) -> Any:
        if decode_number(value) not in bounds:
            raise DecodeError(f"{reprlib.repr(value)} is not in {bounds}")
        return value

    return decode_bounded


def _union(kinds: tuple[Any, ...]) -> Decoder:
    decoders = [_decoder(kind) for kind in kinds]

    def decode_union(value: Any) -> Any:
        # In the order of the annotation: the first that it fits.
        for decoder in decoders:
            try:
                return decoder(value)
            except DecodeError:
                continue
        raise DecodeError(f"{reprlib.repr(value)} is none of {kinds}")

    return decode_union


def _sequence(kind: type, item: Any) -> Decoder:
    decode_item = _decoder(item)

    def decode_sequence(value: Any) -> Any:
        if not isinstance(value, list):
            raise DecodeError(f"{reprlib.repr(value)} is no list")
        return kind(map(decode_item, value))

    return decode_sequence


def _mapping(item: Any) -> Decoder:
    decode_item = _decoder(item)

    def decode_mapping(value: Any) -> Any:
        if not isinstance(value, dict):
            raise DecodeError(f"{reprlib.repr(value)} is no object")
        return {key: decode_item(inner) for key, inner in value.items()}

    return decode_mapping


@functools.cache
def _field_decoders(kind: Any) -> dict[str, Decoder]:
    # An annotation may be text, as in a class that holds some of its own kind.
    hints = typing.get_type_hints(kind, include_extras=True)
    # Without class variables, which are annotated as well.
    if dataclasses.is_dataclass(kind):
        hints = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return {name: _decoder(hint) for name, hint in hints.items()}


def _required_fields(kind: Any) -> frozenset[str]:
    """Returns the fields of a dataclass that have no default."""
    required = set()
    for field in dataclasses.fields(kind):
        has_default = field.default is not dataclasses.MISSING
        has_factory = field.default_factory is not dataclasses.MISSING
        if not has_default and not has_factory:
            required.add(field.name)
    return frozenset(required)


def _object(kind: Any, required: frozenset[str]) -> Decoder:
    """Builds the decoder of a dataclass, or of a `TypedDict`: called, that makes a dictionary."""

    def decode_object(value: Any) -> Any:
        if not isinstance(value, dict):
            raise DecodeError(f"{reprlib.repr(value)} is no object")
        if not required <= value.keys():
            missing = required - value.keys()
            raise DecodeError(f"{', '.join(sorted(missing))} missing")
        # Not outside this function: a dataclass may hold some of its own kind, and their decoder is
        # being built.
        decoders = _field_decoders(kind)
        fields = {}
        for name, inner in value.items():
            # Other keys are those of a later version.
            if name in decoders:
                try:
                    fields[name] = decoders[name](inner)
                except DecodeError as error:
                    raise DecodeError(f"{name}: {error}") from None
        return kind(**fields)

    return decode_object
