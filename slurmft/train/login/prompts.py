"""Prompts, which a language model continues: is there room for what it generates?

The login node and the ranks refuse prompts by this code. It needs neither torch nor transformers.
"""

import functools
import heapq
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.core.files import read_json
from slurmft.train.config import TrainConfig, required
from slurmft.train.login.chats import Conversation, local_template, prompt_text
from slurmft.train.login.formats import format_of
from slurmft.train.login.model_files import folders_of
from slurmft.train.login.texts import LocalTokenizer

_LONGEST = 5
"""Number of the prompts with the most characters that a submission tokenizes."""
_LONGEST_QUESTIONS = 50
"""Number of the questions with the most characters that a submission tokenizes."""
_WRITTEN_ROWS = 50
"""Rows that a submission has the chat template write: it may refuse almost all."""


def check_room(
    where: str,
    tokens: int,
    new_tokens: int,
    positions: int,
    max_length: int | None,
) -> None:
    """Raises UsageError where a prompt is too long: for the model, with what is generated behind
    it, or for --max-length.

    Args:
        where: the prompt, in messages.
        tokens: tokens of it.
        positions: tokens that the model takes.
    """
    room = positions - tokens
    if room < new_tokens:
        cure = "shorten it"
        if room > 0:
            cure += f", or give --max-new-tokens {room}"
        raise UsageError(
            f"{where} has {tokens:,} tokens: with --max-new-tokens {new_tokens} they are more than "
            f"the {positions:,} positions of the model",
            cure,
        )
    if max_length is not None and tokens > max_length:
        raise UsageError(
            f"{where} has {tokens:,} tokens, and --max-length is {max_length:,}",
            f"shorten it, or give --max-length {tokens}",
        )


def check(
    train: TrainConfig,
    model: Path,
    columns: Sequence[list[Any]],
    where: str,
    new_tokens: int,
) -> None:
    """Checks prompts at submission, the longest ones for their tokens, as far as the model's
    folder has what that needs; the job checks all.

    Args:
        model: folder with tokenizer and configuration.
        columns: texts, or conversations and their tools.
        where: the file, in messages.

    Raises:
        UsageError: one is too long, or the chat template refuses it.
    """
    tokenizer = LocalTokenizer.of(str(model))
    positions = _positions(str(model))
    is_chat = train.preset == "chat"
    texts = columns[0]
    if is_chat:
        form: Any = format_of(train)  # that of chats has conversations
        texts = _written(list(form.conversations(columns)), model, where)
    if tokenizer is None or positions is None:
        return
    # By characters, which cost no time: the most tokens are mostly among them.
    for text in heapq.nlargest(_LONGEST, texts, key=len):
        # A chat template has written the special tokens already.
        encoding = tokenizer.tokenizer.encode(text, add_special_tokens=not is_chat)
        tokens = len(encoding.ids)
        # Where the tokenizer ends texts, prompts are not ended.
        if encoding.special_tokens_mask[-1:] == [1]:
            tokens -= 1
        check_room(
            f"{where!r}: the longest text",
            tokens,
            new_tokens,
            min(positions, tokenizer.most),
            train.max_length,
        )


def check_question(
    train: TrainConfig,
    name: str,
    tokens: int,
    longest: int,
    special_tokens: int,
) -> None:
    """Raises UsageError where a question leaves no room for a window of its context.

    Args:
        name: the question, in messages.
        tokens: tokens of it.
        longest: tokens of a window, with the question.
        special_tokens: those that the tokenizer adds to a pair of texts.
    """
    stride = int(required(train, "doc_stride"))
    # A window shares `stride` tokens with the one before: without room for one more, no window
    # would get further in the context.
    if tokens >= longest - special_tokens - stride:
        cure = "a larger --max-length or a smaller --doc-stride"
        # More than the model takes would change nothing.
        if longest < int(required(train, "max_length")):
            cure = (
                f"a smaller --doc-stride; the model takes no more than {longest} tokens"
            )
        raise UsageError(
            f"{name} has {tokens} tokens: beside them, {longest} leave no room for windows that "
            f"share {stride}",
            f"shorten it, or give {cure}",
        )


def longest_questions(
    questions: Iterable[tuple[str, str]],
) -> list[tuple[str, str]]:
    """Returns the questions that `check_questions` looks at: those with the most characters.

    Args:
        questions: what messages call each one, and its text.
    """
    return heapq.nlargest(_LONGEST_QUESTIONS, questions, key=lambda each: len(each[1]))


def check_questions(
    train: TrainConfig,
    model: str,
    questions: Iterable[tuple[str, str]],
    where: str,
) -> None:
    """Checks the longest questions at submission, as far as this machine has of the model what that
    needs; the job checks all.

    Args:
        model: folder, or hub id.
        questions: what messages call each one, and its text.
        where: the data, in messages.

    Raises:
        UsageError: one leaves no room for its context.
    """
    local = LocalTokenizer.of(model)
    positions = _positions(model)
    if local is None or positions is None:
        return
    longest = min(positions, local.most, int(required(train, "max_length")))
    special_tokens = local.tokenizer.num_special_tokens_to_add(is_pair=True)
    for name, question in longest_questions(questions):
        # Without white space before it, as the job tokenizes it.
        encoding = local.tokenizer.encode(question.lstrip(), add_special_tokens=False)
        tokens = len(encoding.ids)
        check_question(train, f"{where!r}: {name}", tokens, longest, special_tokens)


def _written(
    conversations: Sequence[Conversation],
    model: Path,
    where: str,
) -> list[str]:
    """Returns the first prompts and the longest ones, as the chat template writes them."""
    write = local_template(str(model))
    if write is None:
        return []
    rows = list(enumerate(conversations, start=1))
    longest = heapq.nlargest(_LONGEST, rows, key=lambda row: len(str(row[1])))
    texts = []
    for row, (messages, tools) in rows[:_WRITTEN_ROWS] + longest:
        write_row = functools.partial(write, tools=tools)
        what = f"{where!r}: row {row}"
        texts.append(prompt_text(write_row, messages, what, str(model)))
    return texts


def _positions(model: str) -> int | None:
    """Returns the tokens that a model takes, as its configuration says; None: it does not, or is
    not on this machine."""
    for folder in reversed(folders_of(model)):
        config = read_json(folder / "config.json") or {}
        # GPT-2 calls them otherwise.
        for name in ("max_position_embeddings", "n_positions"):
            if isinstance(config.get(name), int):
                return int(config[name])
    return None
