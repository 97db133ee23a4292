"""The checks of all modules here, which import what they compare with when they run."""

from comparisons import (  # noqa: F401
    batches,
    metrics,
    models,
    programs,
    resumes,
    schedules,
    trainings,
)
from comparisons.table import CHECKS

__all__ = ["CHECKS"]
