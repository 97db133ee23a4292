"""What tasks on real data have in common: rows, tokenizer and model, from the hub or folders."""

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError

from slurmft.core import permissions
from slurmft.core.errors import UsageError
from slurmft.core.files import fingerprint
from slurmft.core.hub import hub_cache, is_local
from slurmft.train.config import TrainConfig
from slurmft.train.formats import format_of
from slurmft.train.recipes import TASKS
from slurmft.train.rows import Labels, no_column, read_columns
from slurmft.train.sources import find_split, no_safetensors
from slurmft.train.tasks.base import Task, set_dropout

Loaded = TypeVar("Loaded")

_SETTINGS = (
    "task", "preset", "text_column", "text_pair_column", "label_column", "source_prefix",
    "max_length", "max_target_length", "doc_stride",
)  # fmt: skip
"""Those of a configuration that decide its tokens."""
_ROWS_AT_ONCE = 10_000
"""Rows that the tokenizer gets: its lists of a whole split would take gigabytes."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one split."""

    columns: Mapping[str, Any]
    """Name -> values: a list, or a column of pyarrow's."""
    where: str
    """What to call it in messages."""
    names: dict[str, list[str]] = field(default_factory=dict)
    """Names of the classes of a column, where the data set has them."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str) -> list[Any]:
        """A column's values.

        Raises:
            UsageError: there is no such column.
        """
        if name not in self.columns:
            raise no_column(self.where, name, list(self.columns))
        values = self.columns[name]
        return values if isinstance(values, list) else list(values.to_pylist())


class Pretrained(Task):
    """Loads what a configuration names."""

    hub_subset: str | None = None
    """Which of the data sets to take that a hub id stands for."""
    known_labels: list[str] | None = None
    """Names of the classes, where a split is read that does not say which there are."""
    eos_may_pad: bool = False
    """Whether the end-of-text token pads where there is no token for that."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.warnings: list[str] = []
        """Of the data, see `TokenData`."""

    def rows(self, split: str) -> Rows:
        """A split's rows.

        Raises:
            UsageError: no such data, no such split, or no rows.
        """
        name = self.config.data
        assert name is not None  # from the recipe, or checked
        if is_local(name):
            path = find_split(Path(name), split)
            return Rows(read_columns(path, format_of(self.config).columns), str(path))
        from datasets import ClassLabel

        where = f"{name} ({split})"
        dataset = from_hub("--data", name, lambda: load_split(name, self.hub_subset, split))
        features = ((k, getattr(f, "feature", f)) for k, f in dataset.features.items())  # of lists
        classes = {k: f.names for k, f in features if isinstance(f, ClassLabel)}
        if len(dataset) == 0:
            raise UsageError(f"{where!r} has no rows")
        table = dataset.data.table
        return Rows({k: table.column(k) for k in table.column_names}, where, classes)

    def values(self, rows: Rows) -> list[list[Any]]:
        """The columns that the task reads, checked, in the order of its format.

        Raises:
            UsageError: a column that is missing, or a value that cannot be right.
        """
        form = format_of(self.config)
        columns = [rows.column(name) for name in form.columns]
        form.check(columns, rows.where)
        return columns

    def found_labels(self, rows: Rows) -> Labels:
        """The labels that occur in a split."""
        found = Labels(rows.where)
        found.add(format_of(self.config).labels(self.values(rows)))
        return found

    def encode(
        self, tokenizer: Any, texts: list[list[str]], limit: int | None, what: str
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Token ids and types of every row's text, or pair of texts, of at most `limit` tokens."""
        assert limit is not None  # from the recipe
        whole = getattr(tokenizer, "func", tokenizer)  # of a partial
        longest, cut = min(limit, whole.model_max_length), list[bool]()
        for start in range(0, len(texts[0]), _ROWS_AT_ONCE):
            part = (values[start : start + _ROWS_AT_ONCE] for values in texts)
            encoded = tokenizer(*part, truncation=True, max_length=longest)
            cut += is_cut(encoded)
            all_ids = encoded["input_ids"]
            all_types = encoded.get("token_type_ids") or [[0] * len(ids) for ids in all_ids]
            for ids, types in zip(all_ids, all_types, strict=True):
                yield np.asarray(ids, dtype=np.int32), np.asarray(types, dtype=np.int8)
        self.warn_of_cuts(cut, what, longest)

    def warn_of_cuts(self, cut: Sequence[bool], what: str, longest: int) -> None:
        """Tells how many texts are longer than what is kept of them."""
        if any(cut):
            cuts = f"{sum(cut):,} of {len(cut):,} {what} are cut to {longest} tokens"
            self.warnings.append(f"{cuts}: their ends are not seen")

    def sources(self) -> dict[str, Any] | None:
        """What decides the tokens: data, tokenizer, settings, and the code that makes them.

        None where data or code is in no files that could be compared.
        """
        data = [self._files(split) for split in self.facts.splits]
        if not all(data) or self.config.task not in TASKS:  # own code may import what changes
            return None
        here = Path(__file__).parent
        shared = [here.parent / f"{name}.py" for name in ("data", "formats", "rows")]
        code = [*shared, *sorted(here.glob("*.py"))]
        with tempfile.TemporaryDirectory() as folder:
            self.save_tokenizer(Path(folder))
            tokenizer = {path.name: fingerprint(path) for path in Path(folder).iterdir()}
        return {
            "settings": {name: getattr(self.config, name) for name in _SETTINGS},
            "data": [[(path.suffixes, fingerprint(path)) for path in files] for files in data],
            "tokenizer": tokenizer,
            "types": self.tells_texts_apart(self.tokenizer()),
            "code": [(path.name, fingerprint(path)) for path in code],
            "versions": [version(name) for name in ("transformers", "tokenizers", "pyarrow")],
        }

    def _files(self, split: str) -> list[Path]:
        """The files that hold a split's rows."""
        name = self.config.data
        assert name is not None  # from the recipe, or checked
        if is_local(name):
            return [find_split(Path(name), split)]
        dataset = from_hub("--data", name, lambda: load_split(name, self.hub_subset, split))
        return [Path(file["filename"]) for file in dataset.cache_files]

    def tokenizer(self) -> Any:
        """The model's tokenizer.

        Raises:
            UsageError: there is none, or it has no padding token.
        """
        from transformers import AutoTokenizer

        tokenizer = self._load(AutoTokenizer.from_pretrained)
        if tokenizer.pad_token_id is None and self.eos_may_pad:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise UsageError(f"the tokenizer of {self.config.model!r} has no padding token")
        return tokenizer

    def save_tokenizer(self, folder: Path) -> None:
        self.tokenizer().save_pretrained(folder)

    def tells_texts_apart(self, tokenizer: Any) -> bool:
        """Whether the tokenizer gives types for the tokens of two texts, and the model has them:
        there are tokenizers in use that give them for models that refuse them."""
        from transformers import AutoConfig

        if "token_type_ids" not in tokenizer.model_input_names:
            return False
        return getattr(self._load(AutoConfig.from_pretrained), "type_vocab_size", 0) > 1

    def pretrained(self, auto_model: Any, **settings: Any) -> Any:
        """The weights with a head, in fp32, on the CPU.

        Args:
            auto_model: the class of transformers for that head.
            settings: of the model's configuration.
        """
        import torch
        from transformers import AutoConfig

        from slurmft.train import lora

        config = self._load(AutoConfig.from_pretrained, **settings)
        set_dropout(config, self.config.dropout)
        model, found = self._load(
            auto_model.from_pretrained,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,  # others are pickles
            ignore_mismatched_sizes=True,  # a head of another task gives way to a new one
            output_loading_info=True,
            **lora.quantization(self.config),
        )
        model.missing_keys = found["missing_keys"]
        return model

    def _load(self, load: Callable[..., Loaded], **kwargs: Any) -> Loaded:
        name = self.config.model
        assert name is not None  # from the recipe
        safe = {"trust_remote_code": False}  # or transformers may ask, on no terminal
        return from_hub("--model", name, lambda: load(name, **safe, **kwargs))


def is_cut(encoded: Any) -> list[bool]:
    """Of each text that a fast tokenizer encoded, whether tokens of it were left out."""
    return [bool(encoding.overflowing) for encoding in encoded.encodings or ()]


def load_split(name: str, subset: str | None, split: str) -> Any:
    """One split of a data set of the hub, or of its cache.

    Raises:
        UsageError: the data set has no such split.
    """
    from datasets import load_dataset

    try:
        return load_dataset(name, subset, split=split)
    except ValueError as error:
        if "nknown split" in str(error):
            raise UsageError(f"--data {name!r} has no {split} split", str(error)) from error
        raise


def from_hub(flag: str, name: str, load: Callable[[], Loaded]) -> Loaded:
    """Loads something by name; a hub that is out of reach gives one clear line. What is downloaded
    is for whom the cache is, not for this user alone, as a run's own files are.

    Raises:
        UsageError: it is neither a readable folder, nor in the cache, nor on a hub in reach; or the
            cache is closed to this user.
    """
    cache = _cache(flag)
    try:
        with permissions.as_in(cache):
            return load()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first_line = str(error).strip().partition("\n")[0]
        if flag == "--model" and "safetensors" in first_line:
            raise no_safetensors(name) from error
        if is_local(name):
            raise UsageError(f"{flag} {name!r} cannot be loaded: {first_line}") from error
        if closed := _closed(error, cache):
            raise UsageError(
                f"{flag} {name!r}: no permission to use {closed!r}, of the shared cache",
                "a cache of your own: export HF_HOME=DIR; or its owners open it for a group of "
                f"yours: chmod -R g+rwX,g+s {shlex.quote(str(cache))}",
            ) from error
        raise UsageError(
            f"{flag} {name!r} was not found locally or on the hub: {first_line}",
            "without internet on the nodes, fill the caches on the login node (slurmft fetch ...), "
            f"or give its folder: {flag} DIR",
        ) from error


def _cache(flag: str) -> Path:
    """Where the library that loads a model, or data, writes."""
    if flag == "--model":
        return hub_cache()
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE)


def _closed(error: BaseException | None, cache: Path) -> str | None:
    """The path for which this user lacks permission, by an error or what it comes from."""
    while error is not None:
        if isinstance(error, PermissionError):
            return str(error.filename or cache)
        error = error.__cause__ or error.__context__
    return None
