"""Rows and models from the hub, its caches, or local folders."""

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from slurmft.core import permissions
from slurmft.core.errors import UsageError
from slurmft.core.hub import NotOnHubError, hub_cache, is_local
from slurmft.train.login.rows import (
    OptionalColumn,
    class_names,
    files_of,
    no_column,
    read_columns,
)
from slurmft.train.login.sources import (
    NoSplitError,
    check_no_adapter,
    find_split,
    no_safetensors,
)

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one split."""

    columns: Mapping[str, Any]
    """Name -> values: a list, or a column of pyarrow's."""
    where: str
    """Name of the split in messages."""
    names: dict[str, list[str]] = field(default_factory=dict)
    """Column -> names of its classes, where the data set has them."""
    numbers: Sequence[int] | None = None
    """Numbers of the rows in the data, for messages; None: 1, 2, and so on."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str) -> list[Any]:
        """Returns a column's values; UsageError where there is no such column."""
        if name not in self.columns:
            if isinstance(name, OptionalColumn):
                return [None] * len(self)
            raise no_column(self.where, name, list(self.columns))
        values = self.columns[name]
        if isinstance(values, list):
            return values
        return list(values.to_pylist())

    def number(self, place: int) -> int:
        """Returns the number of a row in the data; `place` counts from 0."""
        if self.numbers is None:
            return place + 1
        return self.numbers[place]

    def chosen(self, is_chosen: Sequence[bool], columns: Sequence[str]) -> "Rows":
        """Returns some of the rows, with the columns of these names."""
        chosen = {}
        for name in columns:
            chosen[name] = list(itertools.compress(self.column(name), is_chosen))
        # Messages name rows by their numbers in the file, of which this is a part.
        numbers = list(itertools.compress(range(1, len(self) + 1), is_chosen))
        return Rows(chosen, self.where, self.names, numbers)


@dataclass(frozen=True, slots=True)
class Source:
    """A data set: a local folder, or one of the hub."""

    name: str
    """Path of the folder, or hub id."""
    subset: str | None = None
    """Name of one of the data sets that a hub id stands for."""
    flag: str = "--data"
    """The flag that names it, in messages."""

    def rows(self, split: str, columns: tuple[str, ...]) -> Rows:
        """Reads the rows of a split.

        Args:
            columns: names of the columns to read; a data set of the hub gives all.

        Raises:
            UsageError: there is no such column, or the split has no rows.
            NoSplitError: there is no such split.
        """
        if is_local(self.name):  # by our reader, which names the row that is wrong
            path = find_split(Path(self.name), split)
            return Rows(read_columns(path, columns), str(path), class_names(path))
        dataset = self._dataset(split)
        where = f"{self.name} ({split})"
        if len(dataset) == 0:
            raise UsageError(f"{where!r} has no rows")
        # Columns stay pyarrow's until one is read: a data set may have large ones of no use.
        table = dataset.data.table
        columns_of_table = {name: table.column(name) for name in table.column_names}
        return Rows(columns_of_table, where, _class_names(dataset))

    def has(self, split: str) -> bool:
        """Returns whether there is such a split."""
        try:
            self.files(split)
        except NoSplitError:
            return False
        return True

    def files(self, split: str) -> list[Path]:
        """Returns the files that hold a split's rows."""
        if is_local(self.name):
            return files_of(find_split(Path(self.name), split))
        dataset = self._dataset(split)
        return [Path(file["filename"]) for file in dataset.cache_files]

    def _dataset(self, split: str) -> Any:
        """Returns a split as a Dataset of the library; NoSplitError where there is none."""
        # Here: a run with a local folder does without this import.
        from datasets import load_dataset

        def load() -> Any:
            try:
                return load_dataset(self.name, self.subset, split=split)
            except ValueError as error:
                # "Unknown" or "unknown": datasets has no type for it.
                if "nknown split" in str(error):
                    problem = f"{self.flag} {self.name!r} has no {split} split"
                    raise NoSplitError(problem, split, str(error)) from error
                raise

        return from_hub(self.flag, self.name, load)


def _class_names(dataset: Any) -> dict[str, list[str]]:
    """Returns the names of the classes of each column that has a class, or a list of classes."""
    from datasets import ClassLabel

    names = {}
    for column, feature in dataset.features.items():
        element = getattr(feature, "feature", feature)  # of a list, what is in it
        if isinstance(element, ClassLabel):
            names[column] = element.names
    return names


def from_hub(flag: str, name: str, load: Callable[[], Loaded]) -> Loaded:
    """Returns what `load` loads from the hub, its cache or a folder.

    A download gets the permissions of the cache: it is for whom the cache is, not for this user
    alone, as a run's own files are.

    Args:
        flag: --model, --data or --mix, for messages.
        name: what is loaded.

    Raises:
        UsageError: it is nowhere, or cannot be read.
    """
    cache = _cache(flag)
    try:
        with permissions.as_in(cache):
            return load()
    # What transformers, datasets and safetensors raise for what is absent, closed or damaged.
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        # transformers wraps the cause in paragraphs of advice.
        first_line = str(error).strip().partition("\n")[0]
        if flag == "--model" and "safetensors" in first_line:
            check_no_adapter(f"--model {name!r}", Path(name))
            raise no_safetensors(name) from error
        if is_local(name):
            problem = f"{flag} {name!r} cannot be loaded: {first_line}"
            raise UsageError(problem) from error
        closed_path = _closed_path(error, cache)
        if closed_path:
            raise UsageError(
                f"{flag} {name!r}: no permission to use {closed_path!r}, of the shared cache",
                "a cache of your own: export HF_HOME=DIR; or its owners open it for a group of "
                f"yours: chmod -R g+rwX,g+s {shlex.quote(str(cache))}",
            ) from error
        absence = NotOnHubError(
            f"{flag} {name!r} was not found locally or on the hub: {first_line}",
            "without internet on the nodes, fill the caches on the login node (slurmft fetch ...), "
            f"or give its folder: {flag} DIR",
        )
        absence.reason = first_line
        raise absence from error


def cached_file(model: str, name: str) -> Path | None:
    """Returns a file of a model, in its folder or the hub's cache, to which it is downloaded; None
    where the model has no such file, or neither cache nor hub is asked for it. Within `from_hub`.
    """
    from transformers.utils import cached_file as transformers_file

    path = transformers_file(model, name, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    return Path(path)


def may_exist(model: str, name: str) -> bool:
    """Returns whether a model may have a file that `cached_file` does not return: nobody has asked
    the hub for it."""
    import huggingface_hub

    if is_local(model):
        return False
    cached = huggingface_hub.try_to_load_from_cache(model, name)
    # Otherwise the library's mark for a file that the hub does not have.
    return cached is None


def _cache(flag: str) -> Path:
    """Returns the folder that the library which loads a model, or data, writes to."""
    if flag == "--model":
        return hub_cache()
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE)


def _closed_path(error: BaseException | None, cache: Path) -> str | None:
    """Returns the path that is closed to this user, by an error or its causes; None: none is."""
    while error is not None:
        if isinstance(error, PermissionError):
            return str(error.filename or cache)
        # Libraries raise errors of their own over it, with "from" or without.
        error = error.__cause__ or error.__context__
    return None
