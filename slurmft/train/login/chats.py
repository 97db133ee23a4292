"""Conversations as a chat template writes them: the same checks on the login node and in the job.

It needs neither torch nor transformers: templates are rendered here as transformers does.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError, one_line
from slurmft.core.files import read_json, to_json
from slurmft.core.text import shown
from slurmft.train.login.model_files import tokenizer_file

Messages = Sequence[dict[str, Any]]
Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
"""Messages, and the tools that the assistant may call."""
Write = Callable[..., str]
"""Returns messages as a template writes them; with `add_generation_prompt`, and the beginning of a
turn of the assistant."""


WEIGHT = "weight"
"""Key of a message: 0 for a turn of the assistant that is not learnt, as OpenAI has it."""
_LEARNING_KEYS = frozenset(
    (
        "train",
        "train_detail",
        "training",
        "loss",
        "loss_mask",
        "loss_scale",
        "loss_weight",
        "mask",
        "masked",
    )
)
"""Keys by which other programs say which messages are learnt."""
_KEYS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    WEIGHT,
    "from",
    "value",
)
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles by their names in ShareGPT's form."""

SYSTEM_ROLES = ("system", "developer")
_PLAIN_KEYS = {"role", "content"}


class FormError(Exception):
    """What a conversation has that no chat template is given."""


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Returns a conversation as chat templates take it.

    It may be in OpenAI's form: the content of a message is a text, a list of parts, or null beside
    tool calls, whose arguments are JSON. Or in ShareGPT's, whose keys are from and value. A null
    is left out; see `check_contents`.

    Raises:
        FormError: a message has what is no text and no tool call.
        TypeError, KeyError: it is no list of messages.
    """
    return [_message_of(each) for each in value]


def _message_of(given: dict[str, Any]) -> dict[str, Any]:
    # Most messages are plain, and there are millions.
    if given.keys() == _PLAIN_KEYS and {str}.issuperset(map(type, given.values())):
        return dict(given)
    # Templates are given no null, as transformers does it; columns of parquet hold one for each key
    # that another message has.
    message = {key: value for key, value in given.items() if value is not None}
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    if "from" in message:
        name = message.pop("from")
        message["role"] = _SHAREGPT_ROLES.get(name, name)
        if "value" in message:
            message["content"] = message.pop("value")
    if not isinstance(message["role"], str):
        raise TypeError
    if "function_call" in message:
        raise FormError("a function_call, which is written as tool_calls today")
    _check_learning(message)
    if "tool_calls" in message:
        message["tool_calls"] = [_call_of(call) for call in message["tool_calls"]]
    if isinstance(message.get("content"), list):
        message["content"] = _content_of(message["content"])
    elif not isinstance(message.get("content", ""), str):
        raise TypeError
    return message


def check_contents(messages: Messages, first: int = 1) -> None:
    """Raises FormError where a message of `messages_of` has neither a content nor a tool call. The
    first one has the number `first` in its row: 0 if it is of the column 'system'."""
    for place, message in enumerate(messages, start=first):
        if "content" not in message and "tool_calls" not in message:
            raise FormError(
                f"no content, or null, in message {place}, of the role {message['role']!r}"
            )


def _check_learning(message: dict[str, Any]) -> None:
    """Raises FormError where a message says in an unknown way whether it is learnt."""
    # Most messages have neither, and there are millions.
    if not _LEARNING_KEYS.isdisjoint(message):
        (key, *_) = (key for key in message if key in _LEARNING_KEYS)
        raise FormError(
            f"the key {key!r} in a message: a turn of the assistant that is not to be learnt "
            f'has "{WEIGHT}": 0'
        )
    if WEIGHT not in message:
        return
    weight = message[WEIGHT]
    if isinstance(weight, bool) or weight not in (0, 1):
        raise FormError(f"a message of the weight {weight!r}, which is 0 or 1")
    if message["role"] != "assistant" and weight:
        raise FormError(
            f"a message of the role {message['role']!r} and the weight {weight!r}: the assistant's "
            "alone are learnt"
        )


def is_learnt(message: dict[str, Any]) -> bool:
    """Returns whether a model learns a message of `messages_of`."""
    return message["role"] == "assistant" and bool(message.get(WEIGHT, 1))


def with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Returns a conversation with the system turn that its row has beside it, as the rows of
    LLaMA-Factory have; None and "" are none.

    Raises:
        FormError: it is no text, or the conversation has another one.
    """
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise FormError(
            f"{shown(repr(system))} in the column 'system', which is no text"
        )
    turns = [text_of(each) for each in messages if each["role"] in SYSTEM_ROLES]
    # The row has it in both places, and it is meant once.
    if turns == [system]:
        return messages
    if turns:
        raise FormError("a text in the column 'system' and a system turn of its own")
    return [{"role": "system", "content": system}, *messages]


def unread_keys(messages: Messages, template: str) -> Iterator[str]:
    """Yields the keys of messages that neither we nor a chat template read."""
    for message in messages:
        for key in message:
            if key not in _KEYS and key not in template:
                yield key


def _content_of(parts: list[Any]) -> str | list[Any]:
    """Returns the content of a message that is a list of parts: a single part is its text."""
    for part in parts:
        if part["type"] != "text":
            raise FormError(f"a part of the type {part['type']!r} in a message")
        part["text"] + ""  # TypeError where it is no text
    texts = [{"type": "text", "text": part["text"]} for part in parts]
    if len(texts) > 1:
        return texts
    return "".join(part["text"] for part in texts)


def _call_of(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object, which templates write."""
    function = dict(call["function"])
    function["name"] + ""  # TypeError where it is no text
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:
            raise FormError(
                f"a tool call whose arguments are no JSON: {shown(arguments)!r}"
            ) from None
    return call | {"function": function}


def _variants(messages: Messages) -> Iterator[Messages]:
    """Yields a conversation, then as templates want it that do not take its tool calls so: with a
    content of ""; with arguments as JSON texts, as OpenAI has them."""
    # No text of a template, which may write messages as JSON.
    messages = [
        {key: value for key, value in message.items() if key != WEIGHT}
        for message in messages
    ]
    yield messages
    if not any("tool_calls" in message for message in messages):
        return
    yield [{"content": ""} | message for message in messages]
    with_texts = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            arguments = to_json(call["function"].get("arguments"))
            function = call["function"] | {"arguments": arguments}
            calls.append(call | {"function": function})
        changed = message
        if calls:
            changed = message | {"tool_calls": calls}
        with_texts.append(changed)
    yield with_texts


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Returns the tools of a conversation, which may be written as JSON.

    Raises:
        ValueError: they are no list of objects.
    """
    tools = value
    if isinstance(value, str):
        tools = json.loads(value)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise ValueError
    return tools


def text_of(message: dict[str, Any]) -> str:
    """Returns the text of a message of `messages_of`; "" where it has tool calls alone."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


def has_form(messages: Messages) -> bool:
    """Returns whether messages have what not every chat template writes."""
    for message in messages:
        if "tool_calls" in message or isinstance(message.get("content"), list):
            return True
    return False


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
    refusal: UsageError | None = None
    for variant in _variants(messages):
        try:
            return _written(write, variant, template)
        except UsageError as error:
            # The first refusal is reported: it is of the conversation as its row has it.
            refusal = refusal or error
    assert refusal is not None  # there is a variant
    raise refusal


def _written(
    write: Write, messages: Messages, template: str
) -> tuple[list[str], list[str]]:
    """Returns and raises as `written`, of one variant."""
    try:
        prompts, texts = _turns(write, messages)
    # Whatever the template raises: it is code of others, and any row may be new to it.
    except Exception as error:
        raise _refused(template, messages, error) from error
    # A model is asked for an answer behind such a prompt: it must have learnt answers behind the
    # same. And an answer is what a text has behind its prompt.
    if not all(map(str.startswith, texts, prompts)):
        raise UsageError(
            f"{template} writes turns of the assistant otherwise than the beginning that a model "
            "continues",
            "give a chat template whose add_generation_prompt is what turns begin with",
        )
    unwritten = _unwritten(messages, prompts, texts)
    if unwritten:
        raise UsageError(
            f"{template} does not write {unwritten}",
            "give a model whose template does, or a template (chat_template.jinja beside the "
            "tokenizer), or change the row",
        )
    return prompts, texts


def _turns(write: Write, messages: Messages) -> tuple[list[str], list[str]]:
    prompts = []
    texts = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompts.append(write(messages[:i], add_generation_prompt=True))
            texts.append(write(messages[: i + 1]))
    return prompts, texts


def _form(messages: Messages) -> str:
    """Says what messages have besides texts; "" where it is nothing."""
    forms = []
    if any(isinstance(message.get("content"), list) for message in messages):
        forms.append("a content in several parts")
    if any("tool_calls" in message for message in messages):
        forms.append("tool calls")
    if not forms:
        return ""
    return f", which has {' and '.join(forms)}"


def _unwritten(messages: Messages, prompts: list[str], texts: list[str]) -> str:
    """Returns what the template leaves out of messages, or writes as Python does; "" for nothing.

    Templates that know no tool calls, or no parts, seldom say so.
    """
    turn = 0
    for message in messages:
        if turn == len(texts):  # nothing behind the last answer is written
            break
        content = message.get("content")
        if isinstance(content, list):
            text = texts[-1]
            is_whole = all(part["text"].strip() in text for part in content)
            if not is_whole or str(content) in text or to_json(content) in text:
                return f"a content in several parts: {shown(to_json(content))}"
        if message["role"] != "assistant":
            continue
        answer = texts[turn][len(prompts[turn]) :]
        turn += 1
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = function.get("arguments")
            names = [function["name"]]
            if isinstance(arguments, dict):
                names += arguments
            # By the names alone: how values are written is the template's own matter.
            if not all(name in answer for name in names):
                return f"the tool call {function['name']!r}"
    return ""


def prompt_messages(messages: Messages) -> Messages:
    """Returns the messages that a model answers: all but a last one of the assistant."""
    if messages and messages[-1]["role"] == "assistant":
        return messages[:-1]
    return messages


def prompt_text(write: Write, messages: Messages, where: str, model: str | None) -> str:
    """Returns the text that a model continues with its answer.

    Args:
        where: the row, in messages.
        model: whose template it is.

    Raises:
        UsageError: the template refuses the conversation.
    """
    template = f"{where}: the chat template of {model!r}"
    refusal: UsageError | None = None
    for variant in _variants(prompt_messages(messages)):
        try:
            _written(write, variant, template)  # its earlier turns
            return write(variant, add_generation_prompt=True)
        except UsageError as error:
            refusal = refusal or error
        except Exception as error:  # as in `_written`
            refusal = refusal or _refused(template, variant, error)
    assert refusal is not None  # there is a variant
    raise refusal


def _refused(template: str, messages: Messages, error: Exception) -> UsageError:
    """Returns the error for a conversation that a template raises an exception for."""
    from jinja2 import TemplateError

    cause = one_line(error)
    if isinstance(error, TemplateError):  # the template's own words
        cause = str(error)
    return UsageError(
        f"{template} refuses it{_form(messages)}: {cause}",
        "change the row, or the template (chat_template.jinja beside the tokenizer)",
    )


def has_end(text: str, messages: Messages) -> bool:
    """Returns whether a template writes anything that ends the last turn of a text, which is one of
    the assistant; white space ends nothing."""
    content = text_of(messages[-1]).rstrip()
    # Of an empty turn nothing is known; there is one by a mistake.
    return not content or not text.rstrip().endswith(content)


def local_template_text(model: str | None) -> str | None:
    """Returns the source of the chat template of a model that is on this machine; None: it cannot
    be read here, and the job says what is wrong with it."""
    file = tokenizer_file(model) if model else None
    if file is None:
        return None
    return _template_text(file.parent, _tokenizer_config(file))


def _tokenizer_config(file: Path) -> dict[str, Any]:
    return read_json(file.with_name("tokenizer_config.json")) or {}


def local_template(model: str | None) -> Write | None:
    """Returns what writes conversations by the template of `local_template_text`."""
    template = local_template_text(model)
    file = tokenizer_file(model) if model else None
    if template is None or file is None:
        return None
    special_tokens = _special_tokens(_tokenizer_config(file))

    def write(
        messages: Messages,
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        text: str = _compiled(template).render(
            messages=list(messages),
            tools=tools,
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
        # jinja2's own filter escapes HTML: a < in a call of a tool would be \u003c.
        return json.dumps(value, **({"ensure_ascii": False} | options))

    # A sandbox, as transformers has: templates come with models, from anybody.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    # Some templates write the date of today, as Llama's do.
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
            # A token with settings of its own is an object, as transformers writes AddedToken.
            text = value.get("content")
        if isinstance(text, str):
            tokens[name] = text
    return tokens
