"""What a command prints with --json, held to the schema that `slurmft schema` prints of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator

from slurmft.cli import schema
from slurmft.cli.parser import Parser
from slurmft.core.errors import Failed
from slurmft.core.json_schema import schema_of


@functools.cache
def json_parsers() -> dict[str, Parser]:
    """Command -> its parser, of the commands that have --json."""
    return {each.prog.removeprefix("slurmft "): each for each in schema.json_parsers()}


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    printed = json_parsers()[name].printed
    return Draft202012Validator(schema_of([*printed, Failed], name))


def assert_fits(words: Sequence[str], out: str) -> None:
    """Asserts that what a command line with --json has printed is as its schema says."""
    name = " ".join(words[:2])
    if name not in json_parsers():
        name = words[0]
    values: list[Any] = [json.loads(out)] if name != "logs" else []
    if name == "logs":
        values = [json.loads(line) for line in out.splitlines()]
    for value in values:
        problems = [
            (context.json_path, context.message)
            for error in _validator(name).iter_errors(value)
            for context in [error, *(error.context or ())]
        ]
        assert not problems, (words, problems)
