"""The option of trackers."""

# No `from __future__ import annotations`: options are read from the types of their fields.

from dataclasses import dataclass

from slurmft.core.errors import unknown
from slurmft.core.options import option

TRACKERS = (
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
    "aim",
    "comet_ml",
    "clearml",
    "dvclive",
    "swanlab",
)
"""Trackers by the names that Accelerate and Python's packages have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerOptions:
    """Trackers of the run's numbers."""

    log_with: tuple[str, ...] = option(
        (),
        f"trackers, with commas or repeatable: {', '.join(TRACKERS)}",
        affects="nothing",
        at="rank",
        metavar="NAME",
        sends=True,
        commands=("render",),
        elsewhere=(
            "report_to",
            "wandb",
            "tensorboard",
        ),
    )

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in TRACKERS:
                raise unknown("--log-with", name, list(TRACKERS))

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `log_with`, each once."""
        names = []
        for text in self.log_with:
            names += [name.strip() for name in text.split(",")]
        # A comma at the end leaves an empty name.
        return tuple(dict.fromkeys(filter(None, names)))
