"""Question answering (rajpurkar/squad): the span of a text that answers a question.

A text that is too long becomes several windows, which overlap. A window is a sample; its prediction
is one row of numbers, so that the ranks keep little, and the best window answers. The rules are
those of transformers' run_qa.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from slurmft.core.errors import UsageError
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.formats import Question
from slurmft.train.tasks import metrics
from slurmft.train.tasks.hub import Pretrained, Rows

N_BEST = 20
"""First tokens, and last tokens, that are candidates of a window."""
MAX_ANSWER_TOKENS = 30
ROWS_AT_ONCE = 1000

SCORE, START, END, NONE = range(4)
"""A prediction: the score of the window's best answer (-inf: there is none), its first and its last
token, and the score of there being no answer."""


class Task(Pretrained):
    """Extractive question answering; preset v2: there may be no answer."""

    metric_names = ("squad_f1", "squad_exact_match")
    evaluates_in_fp32 = True
    needs_offsets = True
    prediction_dtype: np.dtype[Any] = np.dtype(np.float64)
    prediction_shape: tuple[int, ...] = (4,)

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.may_have_none = config.preset == "v2"

    # --- rows to windows --------------------------------------------------------------------------

    def prepare(self) -> TokenData:
        """Reads both splits, and cuts them into windows. What answering needs of these, the
        training data does without."""
        data = super().prepare()
        return replace(data, train=replace(data.train, extra={}))

    def _questions(self, rows: Rows) -> list[Question]:
        of = zip(*self.values(rows), strict=True)
        return [Question.of(row, rows.where, self.may_have_none) for row in of]

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        questions = self._questions(rows)
        windows = zip(*self._windows(tokenizer, questions), strict=True)
        numbers, tokens, types, characters = windows
        return TokenTable.build(
            tokens,
            [answer_span(c, questions[n]) for n, c in zip(numbers, characters, strict=True)],
            types if self.tells_texts_apart(tokenizer) else None,
            questions=np.array(numbers),
            characters=np.concatenate(characters),
        )

    def texts(self, validation: Rows) -> dict[str, Any]:
        return texts_of(self._questions(validation))

    def _windows(
        self, tokenizer: Any, questions: list[Question]
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """Each a question, by its number, and a part of its context: token ids, types, and where
        tokens of the context begin and end in it, -1 for others: int32, (length, 2)."""
        assert self.config.max_length is not None  # from the recipe
        longest = min(self.config.max_length, tokenizer.model_max_length)
        for first in range(0, len(questions), ROWS_AT_ONCE):
            part = questions[first : first + ROWS_AT_ONCE]
            self._check_room(tokenizer, part, longest)
            encoded = tokenizer(
                [q.question.strip() for q in part],
                [q.context for q in part],
                truncation="only_second",
                max_length=longest,
                stride=self.config.doc_stride,
                return_overflowing_tokens=True,
            )
            for row, encoding in zip(
                encoded["overflow_to_sample_mapping"], encoded.encodings, strict=True
            ):
                characters = np.array(encoding.offsets, dtype=np.int32)
                characters[[text != 1 for text in encoding.sequence_ids]] = -1
                ids = np.array(encoding.ids, dtype=np.int32)
                yield first + row, ids, np.array(encoding.type_ids, dtype=np.int8), characters

    def _check_room(self, tokenizer: Any, questions: list[Question], longest: int) -> None:
        assert self.config.doc_stride is not None  # from the recipe
        room = longest - tokenizer.num_special_tokens_to_add(pair=True) - self.config.doc_stride
        texts = [q.question.strip() for q in questions]
        all_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for question, ids in zip(questions, all_ids, strict=True):
            if len(ids) >= room:
                raise UsageError(
                    f"question {question.id!r} has {len(ids)} tokens: beside them, {longest} leave "
                    f"no room for windows that share {self.config.doc_stride}",
                    "give a larger --max-length or a smaller --doc-stride",
                )

    # --- windows to answers -----------------------------------------------------------------------

    def model(self, data: TokenData) -> Any:
        from transformers import AutoModelForQuestionAnswering

        return self.pretrained(AutoModelForQuestionAnswering)

    def loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, int]:
        """Of each window the mean of two cross entropies: of its first, and of its last token."""
        starts, ends = without_padding(output, batch.lengths)
        first, last = batch.targets["labels"].unbind(1)
        both = cross_entropy(starts, first, reduction="sum")
        both = both + cross_entropy(ends, last, reduction="sum")
        return both / 2, len(first)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """The best answer of each window: float64, (batch, 4)."""
        table, (starts, ends) = data.validation, without_padding(output, batch.lengths)
        first = table.padded(table.extra["characters"][:, 0], batch.indices, starts.shape[1], -1)
        return best_spans(starts, ends, torch.from_numpy(first >= 0).to(starts.device))

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        metrics.check_numbers(predictions)
        texts = data.read_texts()
        given = answers(predictions, data.validation, texts, self.may_have_none)
        return metrics.squad(given, texts["answers"], self.may_have_none)


def without_padding(output: Any, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of being an answer's first token, and its last: (batch, width); -inf for padding.

    transformers counts padding as a place like others: a sample's loss, and its best tokens, would
    depend on how long the others of its batch are. `lengths` are those of the windows: int64,
    (batch,).
    """
    starts, ends = output.start_logits, output.end_logits
    padding = (torch.arange(starts.shape[1]) >= lengths[:, None]).to(starts.device)
    return starts.masked_fill(padding, -torch.inf), ends.masked_fill(padding, -torch.inf)


def answer_span(characters: np.ndarray, question: Question) -> tuple[int, int]:
    """A window's tokens in which the first answer begins and ends; (0, 0), the first special token,
    where it is not whole in the window, or there is none. `characters` are those of a
    window, see `Task._windows`.
    """
    if not question.answers:
        return 0, 0
    begin, end = question.starts[0], question.starts[0] + len(question.answers[0])
    (inside,) = np.nonzero(characters[:, 0] >= 0)
    first, last = characters[inside].T
    if not len(inside) or begin < first[0] or end > last[-1]:
        return 0, 0
    return (
        int(inside[np.searchsorted(first, begin, side="right") - 1]),
        int(inside[np.searchsorted(last, end, side="left")]),
    )


def texts_of(questions: list[Question]) -> dict[str, Any]:
    """What answering needs of the questions, as JSON can hold it; each context once."""
    contexts = {text: i for i, text in enumerate(dict.fromkeys(q.context for q in questions))}
    return {
        "contexts": list(contexts),
        "context": [contexts[q.context] for q in questions],
        "answers": [q.answers for q in questions],
    }


def best_spans(starts: torch.Tensor, ends: torch.Tensor, in_context: torch.Tensor) -> torch.Tensor:
    """The best answer of each window, of its `N_BEST` best first and last tokens.

    An answer lies in the context, does not end before it begins, and has at most
    `MAX_ANSWER_TOKENS`. Of equal ones the first token with the higher logit wins, then the one
    further left: as a window's answer must not depend on its batch, the sort is stable.

    Args:
        starts: logits of being the first token, (batch, width).
        ends: of being the last.
        in_context: bool, (batch, width).

    Returns:
        float64, (batch, 4): see `SCORE`. NaN where a logit of the window is.
    """
    n_best = min(N_BEST, starts.shape[1])
    (start, first), (end, last) = (
        (t[:, :n_best] for t in logits.double().sort(dim=1, descending=True, stable=True))
        for logits in (starts, ends)
    )
    length = last[:, None, :] - first[:, :, None] + 1
    good = in_context.gather(1, first)[:, :, None] & in_context.gather(1, last)[:, None, :]
    good &= (length >= 1) & (length <= MAX_ANSWER_TOKENS)
    score = (start[:, :, None] + end[:, None, :]).masked_fill(~good, -torch.inf).flatten(1)
    best = score.argmax(1, keepdim=True)
    none = starts[:, :1].double() + ends[:, :1].double()
    tokens = (first.gather(1, best // n_best), last.gather(1, best % n_best))
    spans = torch.cat((score.gather(1, best), *(t.double() for t in tokens), none), 1)
    is_nan = starts.isnan().any(1) | ends.isnan().any(1)
    return spans.masked_fill(is_nan[:, None], torch.nan)


def answers(
    predictions: np.ndarray, table: TokenTable, texts: dict[str, Any], may_have_none: bool
) -> list[str]:
    """The answer to each question: that of its best window, the first one of equals.

    Args:
        predictions: float64, (windows, 4); see `SCORE`.
        table: the validation split's windows.
        texts: see `texts_of`.
        may_have_none: the answer may be "": where, in the window that says so least, there being
            none has a higher score.
    """
    question = np.asarray(table.extra["questions"])
    count = len(texts["context"])
    order = np.lexsort((-predictions[:, SCORE], question))  # stable
    best = order[np.unique(question[order], return_index=True)[1]]
    none = np.full(count, np.inf)
    np.minimum.at(none, question, predictions[:, NONE])
    tokens = table.offsets[best, None] + predictions[best, START : END + 1].astype(np.int64)
    begins = table.extra["characters"][tokens[:, 0], 0].tolist()
    ends = table.extra["characters"][tokens[:, 1], 1].tolist()
    empty = np.isneginf(predictions[best, SCORE])
    if may_have_none:
        empty |= none > predictions[best, SCORE]
    return [
        "" if empty[i] else texts["contexts"][texts["context"][i]][begins[i] : ends[i]]
        for i in range(count)
    ]
