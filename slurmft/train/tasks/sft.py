"""Supervised fine-tuning: conversations, or prompts and completions. What is learnt is every turn
of the assistant with the token that ends it, or the completion and the end-of-text token.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from slurmft.core.errors import UsageError
from slurmft.train.data.tables import IGNORED, TokenTable
from slurmft.train.login.cells import describe_rows
from slurmft.train.login.sources import no_chat_template
from slurmft.train.tasks import causal_lm
from slurmft.train.tasks.hub import Rows

Sample = tuple[int, str, list[tuple[int, int]]]
"""Its row, its text, and of that what is learnt: first characters, and those behind the last."""


class Task(causal_lm.Task):
    """Chats; or, with the preset completion, prompts and completions."""

    needs_offsets = True

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        """The samples of a split, without those of which no completion is left."""
        longest, ids, labels = self._longest(tokenizer), list[Any](), list[Any]()
        lost, cut = list[int](), 0
        for row, tokens, follows in self._encoded(tokenizer, self._samples(tokenizer, rows)):
            cut += len(tokens) > longest
            if (follows[: longest - 1] == IGNORED).all():
                lost.append(row)
            else:
                ids.append(tokens[:longest])
                labels.append(np.append(follows[: longest - 1], IGNORED))
        told = f"{cut:,} longer than the {longest} tokens of --max-length, which were cut"
        if lost:
            told += f"; {len(lost):,} left out, as no completion is left: {describe_rows(lost)}"
        if not ids:
            raise UsageError(f"{rows.where!r}: no completion is left: {told}", "raise --max-length")
        learnt, total = (np.concatenate(labels) != IGNORED).sum(), sum(map(len, ids))
        found = f"{rows.where!r}: {len(ids):,} samples, {learnt:,} of {total:,} tokens learnt"
        self.notes.append(f"{found}; {told}" if cut or lost else found)
        return TokenTable.build(ids, token_labels=labels)

    def _samples(self, tokenizer: Any, rows: Rows) -> Iterator[Sample]:
        """Of all rows that have a completion."""
        values = [rows.column(name) for name in self.form.columns]
        empty = set(self.form.check(values, rows.where))
        for row, cells in enumerate(zip(*values, strict=True), start=1):
            if row not in empty and self.config.preset == "completion":
                text = "".join(cells)
                yield row, text, [(len(cells[0]), len(text))]
            elif row not in empty:
                yield from self._chat(tokenizer, cells[0], row, f"{rows.where!r}: row {row}")

    def _chat(
        self, tokenizer: Any, messages: list[dict[str, str]], row: int, what: str
    ) -> Iterator[Sample]:
        """A conversation as its template writes it; each turn of the assistant as a sample of its
        own, where it is written otherwise once others follow (as without its thoughts)."""
        from jinja2 import TemplateError

        template = f"{what}: the chat template of {self.config.model!r}"
        turns = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
        write = functools.partial(tokenizer.apply_chat_template, tokenize=False)
        try:
            prompts = [write(messages[:i], add_generation_prompt=True) for i in turns]
            texts = [write(messages[: i + 1]) for i in turns]
        except TemplateError as error:  # as of a role that it does not know
            raise UsageError(
                f"{template} refuses it: {error}",
                "change the row, or the template (chat_template.jinja beside the tokenizer)",
            ) from error
        if not all(map(str.startswith, texts, prompts)):
            raise UsageError(
                f"{template} writes turns of the assistant otherwise than the beginning that a "
                "model continues",
                "give a chat template whose add_generation_prompt is what turns begin with",
            )
        parts = [(len(p), len(t)) for p, t in zip(prompts, texts, strict=True)]
        if all(map(texts[-1].startswith, [*prompts, *texts])):
            yield row, texts[-1], parts
        else:
            yield from ((row, t, [part]) for t, part in zip(texts, parts, strict=True))

    def _encoded(
        self, tokenizer: Any, samples: Iterator[Sample]
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Of each sample its row, its tokens, and for each the one that follows if that is learnt;
        a token that begins before what is learnt, and ends in it, is learnt."""
        is_chat = self.config.preset != "completion"
        while part := list(itertools.islice(samples, causal_lm.ROWS_AT_ONCE)):
            encoded = tokenizer([text for _, text, _ in part], add_special_tokens=not is_chat)
            for (row, _, parts), each in zip(part, encoded.encodings, strict=True):
                begins, ends = np.array(each.offsets, dtype=np.int64).reshape(-1, 2).T
                learnt = np.zeros(len(begins), dtype=bool)
                for begin, end in parts:
                    learnt |= (ends > begin) & (begins < end)
                ids = each.ids
                if not is_chat:  # the token that ends it is learnt, be it the tokenizer's or ours
                    ids = self.ended(tokenizer, ids)
                    learnt = np.append(learnt[: len(ids) - 1], True)
                tokens = np.array(ids, dtype=np.int32)
                yield row, tokens, np.where(learnt[1:], tokens[1:], IGNORED)

    def tokenizer(self) -> Any:
        tokenizer = super().tokenizer()
        if self.config.preset == "chat" and tokenizer.chat_template is None:
            raise no_chat_template(self.config.model)
        return tokenizer
