"""From flags to the configuration of a training run: recipe, then site file, then flags."""

from __future__ import annotations

from typing import Any

from slurmft.core.config import JobConfig, RunConfig, build, options, with_absolute_paths
from slurmft.core.site import merge, site_defaults
from slurmft.train import recipes
from slurmft.train.config import TrainConfig
from slurmft.train.sources import localize

OPTIONS = options(TrainConfig) | options(JobConfig)
"""Name -> field of every option of a training run: flags, and keys of the site file."""


def configure(flags: dict[str, Any]) -> RunConfig:
    """The resolved configuration: flags over the site file over the recipe.

    Raises:
        UsageError: a value that cannot be right, from whichever source.
    """
    values = recipes.fill(merge(site_defaults(OPTIONS), flags))
    job = with_absolute_paths(build(JobConfig, values))
    return RunConfig(program=localize(build(TrainConfig, values)).program(), job=job)
