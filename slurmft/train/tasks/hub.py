"""What tasks on real data have in common: rows, tokenizer and model, from the hub or folders."""

import shlex
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError

from slurmft.core import permissions
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.files import fingerprint
from slurmft.core.hub import hub_cache, is_local
from slurmft.core.options import options
from slurmft.train.config import TrainConfig
from slurmft.train.data.tables import TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.cells import Labels, label_ids, label_numbers
from slurmft.train.login.formats import format_of
from slurmft.train.login.rows import no_column, read_columns
from slurmft.train.login.sources import find_split, no_safetensors
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks.base import Task, set_dropout

Loaded = TypeVar("Loaded")

_SETTINGS = [name for name, each in options(TrainConfig).items() if each.decides_tokens]
"""Options that the tokens depend on, besides those that name model and data."""
_SHARED_CODE = (
    "data/tables.py", "data/token_data.py", "login/cells.py", "login/formats.py", "login/rows.py",
)  # fmt: skip
_TEXTS = ("text", "text_pair")
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
        """A column's values; UsageError where there is no such column."""
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
    needs_offsets: bool = False
    """Whether the tokenizer must tell which words and characters its tokens are of."""
    eos_may_pad: bool = False
    """Whether the end-of-text token pads where there is no token for that."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.form = format_of(config)
        self.notes: list[str] = []
        self.warnings: list[str] = []
        """Of the data, see `TokenData`."""

    # --- data -------------------------------------------------------------------------------------

    def prepare(self) -> TokenData:
        """Reads and tokenizes all splits.

        Raises:
            UsageError: no such data, model or column; a value that cannot be right; nothing to
                learn.
        """
        tokenizer = self.tokenizer()
        train, *validation = (self.rows(split) for split in self.facts.splits)
        names = self.label_names(train)
        first, *others = (self.table(tokenizer, rows, names) for rows in (train, *validation))
        return TokenData(
            first,
            TokenTable.joined(others),
            names,
            tokenizer.pad_token_id,
            sizes=tuple(map(len, others)),
            texts=self.texts(validation[0]),
            notes=tuple(self.notes),
            warnings=tuple(self.warnings),
        )

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        """The tokens of a split with their labels; here of texts, or pairs of texts."""
        labels = self.labels(rows, names)
        texts = self.values(rows)[: 1 + bool(self.config.text_pair_column)]
        ids, types = self.encode(tokenizer, texts, f"texts of {rows.where!r}")
        return TokenTable.build(ids, labels, types)

    def unlabelled(self, tokenizer: Any, texts: Sequence[list[Any]]) -> TokenTable:
        """The tokens of rows that are to be predicted."""
        ids, types = self.encode(tokenizer, texts, "texts")
        return TokenTable.build(ids, [0] * len(ids), types)

    def texts(self, validation: Rows) -> Any:
        """What the metrics need of the validation split besides, see `TokenData.texts`."""

    def rows(self, split: str) -> Rows:
        """A split's rows; UsageError where there is no such split, or it has none."""
        name = str(self.config.data)
        if is_local(name):
            path = find_split(Path(name), split)
            return Rows(read_columns(path, self.form.columns), str(path))
        from datasets import ClassLabel

        where, dataset = f"{name} ({split})", self._dataset(split)
        features = ((k, getattr(f, "feature", f)) for k, f in dataset.features.items())  # of lists
        classes = {k: f.names for k, f in features if isinstance(f, ClassLabel)}
        if len(dataset) == 0:
            raise UsageError(f"{where!r} has no rows")
        table = dataset.data.table
        return Rows({k: table.column(k) for k in table.column_names}, where, classes)

    def values(self, rows: Rows) -> list[list[Any]]:
        """The columns that the task reads, in the order of its format; UsageError where one is
        missing, or a value cannot be right."""
        columns = [rows.column(name) for name in self.form.columns]
        self.form.check(columns, rows.where)
        return columns

    def label_names(self, train: Rows) -> list[str]:
        """Names of the classes: those that are known beforehand, else those that the data set has
        for its classes, else the labels themselves. None where labels are no classes."""
        if not self.form.has_classes:
            return []
        of_data = self.form.names or train.names.get(self.form.columns[-1])
        known = self.known_labels or self.facts.labels or of_data
        return list(known) if known else self.found_labels(train)

    def found_labels(self, train: Rows) -> list[str]:
        """The labels that occur in a split."""
        found = Labels(train.where)
        found.add(self.form.labels(self.values(train)))
        return found.names()

    def labels(self, rows: Rows, names: list[str]) -> list[Any]:
        """A split's labels, classes or numbers; UsageError for one that is missing, of the wrong
        type, or unknown."""
        column = self.form.columns[-1]
        values = rows.column(column)
        if not names:
            return label_numbers(values, rows.where)
        labels = Labels(rows.where, values)
        labels.check_empty()
        for text in labels.oddities() if not is_local(str(self.config.data)) else ():
            warnings.warn(text, SlurmftWarning, stacklevel=2)  # of local data submit has told
        by_number = self.facts.labels is not None or column in rows.names
        return label_ids(values, names, rows.where, by_number)

    def encode(
        self, tokenizer: Any, texts: Sequence[list[str]], what: str, as_target: bool = False
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Token ids of every row's text, or pair of texts, cut to --max-length; and which of the
        two they are of, where that is to be told. Texts begin with --source-prefix; targets do not,
        and are cut to --max-target-length."""
        prefix = self.config.source_prefix if not as_target else None
        limit = self.config.max_target_length if as_target else self.config.max_length
        assert limit is not None  # from the recipe
        longest, cut = min(limit, tokenizer.model_max_length), list[bool]()
        ids, types = list[np.ndarray](), list[np.ndarray]()
        for start in range(0, len(texts[0]), _ROWS_AT_ONCE):
            part = [values[start : start + _ROWS_AT_ONCE] for values in texts]
            part = [[prefix + text for text in values] for values in part] if prefix else part
            given = {"text_target": part[0]} if as_target else dict(zip(_TEXTS, part, strict=False))
            encoded = tokenizer(**given, truncation=True, max_length=longest)
            cut += is_cut(encoded)
            ids += (np.asarray(own, dtype=np.int32) for own in encoded["input_ids"])
            types += (np.asarray(own, dtype=np.int8) for own in encoded.get("token_type_ids", ()))
        self.warn_of_cuts(cut, what, longest)
        apart = len(texts) > 1 and self.tells_texts_apart(tokenizer)
        return ids, types if apart else None

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
        shared = [here.parent / name for name in _SHARED_CODE]
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
        name = str(self.config.data)
        if is_local(name):
            return [find_split(Path(name), split)]
        return [Path(file["filename"]) for file in self._dataset(split).cache_files]

    def _dataset(self, split: str) -> Any:
        """A split of a data set of the hub, or of its cache; UsageError where there is none."""
        from datasets import load_dataset

        name = str(self.config.data)

        def load() -> Any:
            try:
                return load_dataset(name, self.hub_subset, split=split)
            except ValueError as error:
                if "nknown split" in str(error):
                    raise UsageError(f"--data {name!r} has no {split} split", str(error)) from error
                raise

        return from_hub("--data", name, load)

    def tokenizer(self) -> Any:
        """The model's tokenizer; UsageError where there is none, or it lacks something."""
        from transformers import AutoTokenizer

        what = f"the tokenizer of {self.config.model!r}"
        tokenizer = self._load(AutoTokenizer.from_pretrained)
        if tokenizer.pad_token_id is None and self.eos_may_pad:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise UsageError(f"{what} has no padding token")
        if self.needs_offsets and not tokenizer.is_fast:
            raise UsageError(f"{what} does not tell where tokens are")
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
        """The weights with a head, that of a class of transformers, in fp32, on the CPU; `settings`
        are of the model's configuration."""
        import torch
        from transformers import AutoConfig

        from slurmft.train.engine import lora

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


def from_hub(flag: str, name: str, load: Callable[[], Loaded]) -> Loaded:
    """Loads something by name; a hub that is out of reach gives one clear line. What is downloaded
    is for whom the cache is, not for this user alone, as a run's own files are. UsageError where it
    is nowhere, or cannot be read.
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
