"""Supervised fine-tuning: conversations, or prompts and completions.

The model learns every turn of the assistant with the token that ends it, or the completion and the
end-of-text token.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from slurmft.core.errors import UsageError
from slurmft.train.data.tables import IGNORED, TokenTable
from slurmft.train.login.cells import describe_rows
from slurmft.train.login.chats import (
    Conversation,
    has_end,
    is_learnt,
    prompt_text,
    written,
)
from slurmft.train.login.sources import no_chat_template
from slurmft.train.tasks import causal_lm
from slurmft.train.tasks.hub import Rows


class Sample(NamedTuple):
    """A text, and the parts of it that the model learns."""

    row: int
    text: str
    learnt: list[tuple[int, int]]
    """First character of each part, and the one behind its last."""
    is_ended: bool = False
    """What ends its last part is in the text; else the end-of-text token is put behind it."""


class Task(causal_lm.Task):
    """Chats; or, with the preset completion, prompts and completions."""

    needs_offsets = True

    _unended = 0
    """Chats of the split under way whose template writes nothing that ends a turn."""

    @property
    def _is_chat(self) -> bool:
        return self.config.preset != "completion"

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        """Returns the samples of a split, without those of which no completion is left."""
        longest = self.longest(tokenizer)
        ids: list[Any] = []
        labels: list[Any] = []
        left_out: list[int] = []
        cut = 0
        self._unended = 0
        samples = self._samples(tokenizer, rows)
        for row, tokens, next_tokens in self._encoded(tokenizer, samples):
            if len(tokens) > longest:
                cut += 1
            # The last token that is kept has no next one.
            kept_labels = next_tokens[: longest - 1]
            if (kept_labels == IGNORED).all():
                left_out.append(row)
            else:
                ids.append(tokens[:longest])
                labels.append(np.append(kept_labels, IGNORED))
        remark = (
            f"{cut:,} longer than the {longest} tokens of --max-length, which were cut"
        )
        if left_out:
            count = f"{len(left_out):,} left out, as no completion is left"
            remark += f"; {count}: {describe_rows(left_out)}"
        if not ids:
            problem = f"{rows.where!r}: no completion is left: {remark}"
            raise UsageError(problem, "raise --max-length")
        learnt = (np.concatenate(labels) != IGNORED).sum()
        total = sum(len(sample) for sample in ids)
        counts = f"{len(ids):,} samples, {learnt:,} of {total:,} tokens learnt"
        if self._unended:
            counts += (
                f"; the chat template ends no turn: {tokenizer.eos_token!r} is learnt behind the "
                f"last one of {self._unended:,} samples"
            )
        note = f"{rows.where!r}: {counts}"
        if cut or left_out:
            note += f"; {remark}"
        self.notes.append(note)
        return TokenTable.build(ids, token_labels=labels)

    def _samples(self, tokenizer: Any, rows: Rows) -> Iterator[Sample]:
        """Yields the samples of all rows that have a completion."""
        columns = [rows.column(name) for name in self.form.columns]
        empty = set(self.form.check(columns, rows.where))
        form: Any = self.form  # that of chats has conversations
        for place, cells in enumerate(zip(*columns, strict=True)):
            if place + 1 in empty:
                continue
            row = rows.number(place)
            if self._is_chat:
                (conversation,) = form.conversations([[cell] for cell in cells])
                what = f"{rows.where!r}: row {row}"
                yield from self._chat(tokenizer, conversation, row, what)
            else:
                prompt = cells[0]
                text = "".join(cells)
                yield Sample(row, text, [(len(prompt), len(text))])

    def _chat(
        self,
        tokenizer: Any,
        conversation: Conversation,
        row: int,
        what: str,
    ) -> Iterator[Sample]:
        """Yields a conversation as its template writes it.

        Where the template writes a turn of the assistant otherwise once others follow, as without
        its thoughts, each turn is a sample of its own.

        Raises:
            UsageError: the template refuses the conversation, or begins turns otherwise than the
                prompt that a model continues.
        """
        messages, tools = conversation
        write = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
        prompts, texts = written(write, messages, what, self.config.model)
        turns: list[Sample] = []
        learnt: list[Sample] = []
        for place, message in enumerate(messages, start=1):
            if message["role"] != "assistant":
                continue
            prompt = prompts[len(turns)]
            text = texts[len(turns)]
            # Nothing is put behind a turn that is not learnt.
            is_ended = not is_learnt(message) or has_end(text, messages[:place])
            turns.append(Sample(row, text, [(len(prompt), len(text))], is_ended))
            if is_learnt(message):
                learnt.append(turns[-1])
        whole = turns[-1]
        # Else what was read before a turn depends on the turns after it.
        if all(whole.text.startswith(text) for text in [*prompts, *texts]):
            parts = [part for turn in learnt for part in turn.learnt]
            yield whole._replace(learnt=parts)
            return
        yield from learnt

    def unlabelled(self, tokenizer: Any, texts: Sequence[list[Any]]) -> TokenTable:
        if not self._is_chat:
            return super().unlabelled(tokenizer, texts)
        form: Any = self.form  # that of chats has conversations
        prompts = []
        for row, (messages, tools) in enumerate(form.conversations(texts), start=1):
            write = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
            prompt = prompt_text(write, messages, f"row {row}", self.config.model)
            prompts.append(prompt)
        return self.prompt_table(tokenizer, prompts, is_written=True)

    def ends(self, tokenizer: Any) -> list[int]:
        """Returns the end-of-text token; of a chat the special token, too, that the template ends
        turns of the assistant with."""
        ends = super().ends(tokenizer)
        if not self._is_chat:
            return ends
        answer = "answer"
        messages = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": answer},
        ]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # the template may refuse what is in none of the rows
            return ends
        _, _, behind_answer = text.rpartition(answer)
        ids = tokenizer(behind_answer, add_special_tokens=False)["input_ids"]
        # Anything else may be within an answer, too.
        if ids and ids[0] in tokenizer.added_tokens_decoder:
            ends.append(ids[0])
        return ends

    def _encoded(
        self,
        tokenizer: Any,
        samples: Iterator[Sample],
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields for each sample its row, its tokens, and for each but the last the one that
        follows, or `IGNORED` if that is not learnt."""
        while part := list(itertools.islice(samples, causal_lm.ROWS_AT_ONCE)):
            texts = [sample.text for sample in part]
            # A chat template writes special tokens itself.
            encoded = tokenizer(texts, add_special_tokens=not self._is_chat)
            for sample, encoding in zip(part, encoded.encodings, strict=True):
                ids = encoding.ids
                learns = _is_learnt(encoding.offsets, sample.learnt)
                if not sample.is_ended:  # the token that ends it is learnt, too
                    # may be the tokenizer's, or be added here
                    ids = self.ended(tokenizer, ids)
                    self._unended += self._is_chat
                    # The last token is now the end-of-text token, whoever put it there.
                    learns = np.append(learns[: len(ids) - 1], True)
                tokens = np.array(ids, dtype=np.int32)
                # A token is learnt by the one before it.
                next_tokens = np.where(learns[1:], tokens[1:], IGNORED)
                yield sample.row, tokens, next_tokens

    def tokenizer(self) -> Any:
        tokenizer = super().tokenizer()
        if self.config.preset == "chat" and tokenizer.chat_template is None:
            raise no_chat_template(self.config.model)
        return tokenizer


def _is_learnt(
    offsets: list[tuple[int, int]], parts: list[tuple[int, int]]
) -> np.ndarray:
    """Returns for each token whether it is learnt: bool, (tokens,).

    A token that begins before a part, and ends in it, is learnt.

    Args:
        offsets: character at which each token begins, and the one behind its end.
        parts: the same, for what is learnt.
    """
    # The shape, because a text without tokens has an empty list of offsets.
    pairs = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    begins, ends = pairs.T
    is_learnt = np.zeros(len(begins), dtype=bool)
    for begin, end in parts:
        # A token is of a part where the two overlap.
        is_learnt |= (ends > begin) & (begins < end)
    return is_learnt
