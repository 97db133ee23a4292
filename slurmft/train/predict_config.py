"""The options of `slurmft predict` that a training does not have."""

# No `from __future__ import annotations`: options are read from the types of their fields.

from dataclasses import dataclass

from slurmft.core.options import MOST_TOKENS, check_options, option

GENERATIONS = ("greedy", "model")
NEW_TOKENS = 256
"""Tokens that a language model generates at most, unless --max-new-tokens says another number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictConfig:
    """How texts are generated."""

    max_new_tokens: int | None = option(
        None,
        f"tokens generated of each text at most (default: {NEW_TOKENS}; seq2seq: as the run "
        "evaluated)",
        affects="result",
        at="rank",
        metavar="TOKENS",
        least=1,
        most=MOST_TOKENS,
    )
    generation: str = option(
        "greedy",
        "next tokens of a language model: the most probable one (greedy), or as the "
        "generation_config.json of the model says (model), which may draw them",
        affects="result",
        at="rank",
        choices=GENERATIONS,
    )

    def __post_init__(self) -> None:
        check_options(self)
