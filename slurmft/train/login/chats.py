"""Conversations as a chat template writes them: the same checks on the login node and in the job.

It needs neither torch nor transformers: templates are rendered here as transformers does.
"""

import functools
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError, one_line
from slurmft.core.files import read_json
from slurmft.train.login.sources import tokenizer_file

Messages = Sequence[dict[str, str]]
Write = Callable[..., str]
"""Returns messages as a template writes them; with `add_generation_prompt`, and the beginning of a
turn of the assistant."""


def written(
    write: Write,
    messages: Messages,
    where: str,
    model: str | None,
) -> tuple[list[str], list[str]]:
    """Returns for each turn of the assistant the text before it, and the text up to its end.

    Args:
        where: the row, in messages.
        model: whose template it is.

    Raises:
        UsageError: the template refuses the conversation, or begins turns otherwise than the
            prompt that a model continues.
    """
    template = f"{where}: the chat template of {model!r}"
    prompts: list[str] = []
    texts: list[str] = []
    try:
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompts.append(write(messages[:i], add_generation_prompt=True))
                texts.append(write(messages[: i + 1]))
    # Whatever the template raises: it is code of others, and any row may be new to it.
    except Exception as error:
        from jinja2 import TemplateError

        cause = one_line(error)
        if isinstance(error, TemplateError):  # the template's own words
            cause = str(error)
        raise UsageError(
            f"{template} refuses it: {cause}",
            "change the row, or the template (chat_template.jinja beside the tokenizer)",
        ) from error
    if not all(map(str.startswith, texts, prompts)):
        raise UsageError(
            f"{template} writes turns of the assistant otherwise than the beginning that a model "
            "continues",
            "give a chat template whose add_generation_prompt is what turns begin with",
        )
    return prompts, texts


def has_end(text: str, messages: Messages) -> bool:
    """Returns whether a template writes anything that ends the last turn of a text, which is one of
    the assistant; white space ends nothing."""
    content = messages[-1]["content"].rstrip()
    # Of an empty turn nothing is known; there is one by a mistake.
    return not content or not text.rstrip().endswith(content)


def local_template(model: str | None) -> Write | None:
    """Returns the chat template of a model that is on this machine; None: it cannot be read here,
    and the job says what is wrong with it."""
    file = tokenizer_file(model) if model else None
    if file is None:
        return None
    config = read_json(file.with_name("tokenizer_config.json")) or {}
    template = _template_text(file.parent, config)
    if template is None:
        return None
    special_tokens = _special_tokens(config)

    def write(messages: Messages, add_generation_prompt: bool = False) -> str:
        text: str = _compiled(template).render(
            messages=list(messages),
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
        return text

    return write


@functools.lru_cache
def _compiled(template: str) -> Any:
    """Returns a template with what transformers gives templates besides their variables."""
    # 60 ms, for chats alone
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag that marks what the assistant says: here it marks nothing."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **({"ensure_ascii": False} | options))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment.from_string(template)


def _template_text(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    # Several templates have names; the one of that name is taken.
    if isinstance(template, list):
        by_name = {each.get("name"): each.get("template") for each in template}
        template = by_name.get("default")
    if not isinstance(template, str):
        return None
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns the special tokens of a tokenizer, which templates have as variables."""
    tokens = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        text = value
        if isinstance(value, dict):
            text = value.get("content")
        if isinstance(text, str):
            tokens[name] = text
    return tokens
