"""Question answering (rajpurkar/squad): the span of a text that answers a question.

A text that is too long becomes several windows, which overlap. A window is a sample; its prediction
is one row of numbers, so that the ranks keep little, and the best window answers. The rules are
those of transformers' run_qa.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from slurmft.train.config import TrainConfig, required
from slurmft.train.data.tables import Batch, TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.formats import Question
from slurmft.train.login.prompts import check_question
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks import metrics
from slurmft.train.tasks.evaluate_metrics import MetricInputs, answer_inputs
from slurmft.train.tasks.hub import Rows
from slurmft.train.tasks.pretrained import Pretrained

N_BEST = 20
"""Number of first tokens, and of last tokens, that are candidates of a window."""
MAX_ANSWER_TOKENS = 30
ROWS_AT_ONCE = 1000

# Places in a prediction: the score of the window's best answer (-inf: there is none), its first and
# its last token, and the score of there being no answer.
SCORE, START, END, NONE = range(4)


class Window(NamedTuple):
    """A question and a part of its context, as tokens."""

    question: int
    """Number of the question."""
    ids: np.ndarray
    """Token ids: int32, (length,)."""
    types: np.ndarray
    """Number of the text that each token is of: int8, (length,)."""
    characters: np.ndarray
    """Where tokens of the context begin and end in it; -1 for others: int32, (length, 2)."""


class Task(Pretrained):
    """Extractive question answering; preset v2: there may be no answer."""

    metric_names = TASKS["squad"].metrics
    evaluates_in_fp32 = True
    needs_offsets = True
    prediction_dtype: np.dtype[Any] = np.dtype(np.float64)
    prediction_shape: tuple[int, ...] = (4,)

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.may_have_none = config.preset == "v2"

    # --- rows to windows --------------------------------------------------------------------------

    def training_table(
        self, tokenizer: Any, rows: Rows, names: list[str]
    ) -> TokenTable:
        # It is not answered: what that needs would take memory.
        return replace(self.table(tokenizer, rows, names), extra={})

    def _questions(self, rows: Rows) -> list[Question]:
        questions = []
        # `values` has columns; a question is a row of them.
        for cells in zip(*self.values(rows), strict=True):
            question = Question.of(cells, rows.where, self.may_have_none)
            questions.append(question)
        return questions

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        return self._table(tokenizer, self._questions(rows))

    def _table(self, tokenizer: Any, questions: list[Question]) -> TokenTable:
        windows = list(self._windows(tokenizer, questions))
        types = None
        if self.tells_texts_apart(tokenizer):
            types = [window.types for window in windows]
        spans = []
        for window in windows:
            question = questions[window.question]
            spans.append(answer_span(window.characters, question))
        ids = [window.ids for window in windows]
        numbers = [window.question for window in windows]
        characters = [window.characters for window in windows]
        return TokenTable.build(
            ids,
            spans,
            types,
            questions=np.array(numbers),
            characters=np.concatenate(characters),
        )

    def unlabelled(self, tokenizer: Any, texts: Sequence[list[Any]]) -> TokenTable:
        questions = []
        for row, (question, context) in enumerate(zip(*texts, strict=True), start=1):
            questions.append(Question(f"row {row}", question, context, [], []))
        return self._table(tokenizer, questions)

    def texts(self, validation: Rows) -> dict[str, Any]:
        return texts_of(self._questions(validation))

    def _windows(self, tokenizer: Any, questions: list[Question]) -> Iterator[Window]:
        longest = self.longest(tokenizer)
        stride = int(required(self.config, "doc_stride"))
        for first in range(0, len(questions), ROWS_AT_ONCE):
            part = questions[first : first + ROWS_AT_ONCE]
            self._check_room(tokenizer, part, longest)
            encoded = tokenizer(
                # As transformers' run_qa.py: white space in front would take room from contexts.
                [question.question.lstrip() for question in part],
                [question.context for question in part],
                truncation="only_second",
                max_length=longest,
                stride=stride,
                return_overflowing_tokens=True,
            )
            numbers = encoded["overflow_to_sample_mapping"]
            for number, encoding in zip(numbers, encoded.encodings, strict=True):
                characters = np.array(encoding.offsets, dtype=np.int32)
                # 0 for tokens of the question, 1 for the context's, None for special ones.
                is_outside = [text != 1 for text in encoding.sequence_ids]
                characters[is_outside] = -1  # special tokens, and those of the question
                yield Window(
                    question=first + number,
                    ids=np.array(encoding.ids, dtype=np.int32),
                    types=np.array(encoding.type_ids, dtype=np.int8),
                    characters=characters,
                )

    def _check_room(
        self,
        tokenizer: Any,
        questions: list[Question],
        longest: int,
    ) -> None:
        """Raises UsageError where a question leaves no room for a window of its context."""
        special_tokens = tokenizer.num_special_tokens_to_add(pair=True)
        texts = [question.question.lstrip() for question in questions]
        all_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for question, ids in zip(questions, all_ids, strict=True):
            name = f"question {question.id!r}"
            check_question(self.config, name, len(ids), longest, special_tokens)

    # --- windows to answers -----------------------------------------------------------------------

    def model(self, data: TokenData) -> Any:
        from transformers import AutoModelForQuestionAnswering

        return self.pretrained(AutoModelForQuestionAnswering)

    def loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, int]:
        """Returns the mean of two cross entropies of each window, of its first and of its last
        token; summed over windows."""
        start_logits, end_logits = without_padding(output, batch.lengths)
        first, last = batch.targets["labels"].unbind(1)
        total = cross_entropy(start_logits, first, reduction="sum")
        # The answer of a window without one is its first token, see `answer_span`.
        total = total + cross_entropy(end_logits, last, reduction="sum")
        return total / 2, len(first)

    def predict(self, output: Any, batch: Batch, data: TokenData) -> Any:
        """Returns the best answer of each window: float64, (batch, 4)."""
        start_logits, end_logits = without_padding(output, batch.lengths)
        table = data.validation
        width = start_logits.shape[1]
        # Tokens outside the context begin at no character, see `Window`; nor does padding.
        first_characters = table.extra["characters"][:, 0]
        begins = table.padded(first_characters, batch.indices, width, fill=-1)
        in_context = torch.from_numpy(begins >= 0).to(start_logits.device)
        return best_spans(start_logits, end_logits, in_context)

    def compute(self, predictions: np.ndarray, data: TokenData) -> dict[str, float]:
        metrics.check_numbers(predictions)
        texts = data.read_texts()
        answers_of_model = self._answers(predictions, data, texts)
        return metrics.squad(answers_of_model, texts["answers"], self.may_have_none)

    def metric_inputs(
        self,
        predictions: np.ndarray,
        data: TokenData,
    ) -> dict[str, list[MetricInputs]]:
        texts = data.read_texts()
        answers_of_model = self._answers(predictions, data, texts)
        return {"": answer_inputs(answers_of_model, texts)}

    def _answers(
        self,
        predictions: np.ndarray,
        data: TokenData,
        texts: dict[str, Any],
    ) -> list[str]:
        return answers(predictions, data.validation, texts, self.may_have_none)


def without_padding(
    output: Any, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits of being an answer's first token, and its last: (batch, width).

    They are -inf for padding. transformers counts padding as a place like others: a sample's loss,
    and its best tokens, would depend on how long the others of its batch are.

    Args:
        lengths: number of tokens of each window: int64, (batch,).
    """
    width = output.start_logits.shape[1]
    is_padding = torch.arange(width) >= lengths[:, None]
    is_padding = is_padding.to(output.start_logits.device)
    return (
        output.start_logits.masked_fill(is_padding, -torch.inf),
        output.end_logits.masked_fill(is_padding, -torch.inf),
    )


def answer_span(characters: np.ndarray, question: Question) -> tuple[int, int]:
    """Returns a window's tokens in which the first answer begins and ends.

    They are (0, 0), the first special token, where the answer is not whole in the window, or there
    is none.

    Args:
        characters: see `Window`.
    """
    if not question.answers:
        return 0, 0
    begin = question.starts[0]
    end = begin + len(question.answers[0])
    # Tokens of the context alone, where characters grow from token to token: `searchsorted` needs
    # them sorted.
    (context_tokens,) = np.nonzero(characters[:, 0] >= 0)
    begins, ends = characters[context_tokens].T
    if not len(context_tokens):
        return 0, 0
    if begin < begins[0] or end > ends[-1]:
        return 0, 0
    first = np.searchsorted(begins, begin, side="right") - 1
    last = np.searchsorted(ends, end, side="left")
    return int(context_tokens[first]), int(context_tokens[last])


def texts_of(questions: list[Question]) -> dict[str, Any]:
    """Returns what answering needs of the questions, as JSON can hold it; each context once."""
    contexts = list(dict.fromkeys(question.context for question in questions))
    numbers = {context: number for number, context in enumerate(contexts)}
    return {
        "contexts": contexts,
        "context": [numbers[question.context] for question in questions],
        "answers": [question.answers for question in questions],
        "ids": [question.id for question in questions],
        "starts": [question.starts for question in questions],
    }


def best_spans(
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    in_context: torch.Tensor,
) -> torch.Tensor:
    """Returns the best answer of each window, of its `N_BEST` best first and last tokens.

    An answer lies in the context, does not end before it begins, and has at most
    `MAX_ANSWER_TOKENS`. Of equal ones the first token with the higher logit wins, then the one
    further left: as a window's answer must not depend on its batch, the sort is stable.

    Args:
        start_logits: logits of being the first token, (batch, width).
        end_logits: logits of being the last.
        in_context: the token is of the context: bool, (batch, width).

    Returns:
        float64, (batch, 4): see `SCORE`. NaN where a logit of the window is.
    """
    n_best = min(N_BEST, start_logits.shape[1])
    start, first = _best(start_logits, n_best)
    end, last = _best(end_logits, n_best)
    # Every pair of a first and a last token: (batch, first, last).
    length = last[:, None, :] - first[:, :, None] + 1
    first_in_context = in_context.gather(1, first)
    last_in_context = in_context.gather(1, last)
    is_answer = first_in_context[:, :, None] & last_in_context[:, None, :]
    is_answer &= (length >= 1) & (length <= MAX_ANSWER_TOKENS)
    scores = start[:, :, None] + end[:, None, :]
    # Flat: pair i is of the first token i // n_best and the last token i % n_best.
    scores = scores.masked_fill(~is_answer, -torch.inf).flatten(1)
    best = scores.argmax(1, keepdim=True)
    score = scores.gather(1, best)
    best_first = first.gather(1, best // n_best).double()
    best_last = last.gather(1, best % n_best).double()
    # The first token, a special one, stands for there being no answer.
    none = start_logits[:, :1].double() + end_logits[:, :1].double()
    spans = torch.cat((score, best_first, best_last, none), 1)
    # Comparisons with NaN would give some answer all the same, see `metrics.check_numbers`.
    has_nan = start_logits.isnan().any(1) | end_logits.isnan().any(1)
    return spans.masked_fill(has_nan[:, None], torch.nan)


def _best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the highest logits of each window as float64, and their tokens: (batch, count)."""
    # Not topk: of equal values it may return any.
    values, tokens = logits.double().sort(dim=1, descending=True, stable=True)
    return values[:, :count], tokens[:, :count]


def answers(
    predictions: np.ndarray,
    table: TokenTable,
    texts: dict[str, Any],
    may_have_none: bool,
) -> list[str]:
    """Returns the answer to each question: that of its best window, the first one of equals.

    Args:
        predictions: float64, (windows, 4); see `SCORE`.
        table: the validation split's windows.
        texts: see `texts_of`.
        may_have_none: the answer may be "": where, in the window that says so least, there being
            none has a higher score.
    """
    questions = np.asarray(table.extra["questions"])
    count = len(texts["context"])
    # By question, then the highest score first; the sort is stable.
    scores = predictions[:, SCORE]
    order = np.lexsort((-scores, questions))
    _, first_of_question = np.unique(questions[order], return_index=True)
    best = order[first_of_question]
    none = np.full(count, np.inf)
    # The window that says "no answer" least decides, as in run_qa.py. By `at`, because a question
    # comes once for each of its windows: indexed assignment would keep one of them.
    np.minimum.at(none, questions, predictions[:, NONE])
    # Predictions count tokens within a window, the table's arrays count all of them.
    tokens_of_window = predictions[best, START : END + 1].astype(np.int64)
    tokens = table.offsets[best, None] + tokens_of_window
    characters = table.extra["characters"]
    begins = characters[tokens[:, 0], 0].tolist()
    ends = characters[tokens[:, 1], 1].tolist()
    best_scores = scores[best]
    # No span of the window can be an answer, see `SCORE`.
    is_empty = np.isneginf(best_scores)
    if may_have_none:
        is_empty |= none > best_scores
    answers_of_questions = []
    for i, context in enumerate(texts["context"]):
        text = texts["contexts"][context]
        answer = text[begins[i] : ends[i]]
        if is_empty[i]:
            answer = ""
        answers_of_questions.append(answer)
    return answers_of_questions
