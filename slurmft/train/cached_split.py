"""Reads a split of a data set of the hub for `slurmft data`: as ranks do, from the cache alone."""

import os
from collections.abc import Iterator
from typing import Any

from slurmft import locks
from slurmft.core.errors import UsageError
from slurmft.core.hub import NotOnHubError
from slurmft.core.site import job_default
from slurmft.train.config import TrainConfig
from slurmft.train.login.rows import Chunk
from slurmft.train.login.sources import fetch_command
from slurmft.train.login.validation_part import Part

_ROWS_AT_ONCE = 1000


def cached_split(
    train: TrainConfig, name: str
) -> tuple[str, list[Chunk], tuple[str, ...]]:
    """Returns the name of a split in messages; its columns, some rows at a time; and the names of
    its classes, where it has them beside their numbers. Of a split that --validation-fraction
    makes it returns all rows of the training data.

    Raises:
        UsageError: the data set is not in the cache, has no such split, or lacks a column.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Before datasets is imported: jobs use the cache, too.
    locks.arm(job_default("file_locks"))
    from huggingface_hub import constants

    # It has read the variable where its caches were looked for, and would ask the hub.
    constants.HF_HUB_OFFLINE = True
    import datasets

    from slurmft.train import tasks

    # It would say at each split that the hub is not asked.
    datasets.logging.set_verbosity_error()
    task: Any = tasks.get(train)
    try:
        if Part.of(train, name):
            rows = task.rows_to_divide()
        else:
            rows = task.rows(name)
    except NotOnHubError as error:
        # Without its flag: a source of --mix is read as the data of a configuration.
        raise UsageError(
            f"{train.data!r} is no folder, and not in the cache: {error.reason}",
            f"{fetch_command(train)}; or give its folder",
        ) from error
    columns = [rows.column(column) for column in task.form.columns]
    names = ()
    if task.form.has_classes:
        names = rows.names.get(task.form.columns[-1], ())
    return rows.where, list(_in_chunks(columns, rows.where)), tuple(names)


def _in_chunks(columns: list[list[Any]], where: str) -> Iterator[Chunk]:
    count = len(columns[0])
    for start in range(0, count, _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        part = [column[start:end] for column in columns]
        # The last part may be shorter: `end` is then behind the last row.
        share = min(1.0, end / count)
        yield Chunk(share, part, where, start + 1)
