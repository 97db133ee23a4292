"""Tasks on real data: rows, tokenizer and model that a configuration names."""

import functools
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from slurmft.core import plugins
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.files import fingerprint
from slurmft.core.hub import is_local
from slurmft.core.options import options
from slurmft.core.trusted import temporary_place
from slurmft.train.config import TrainConfig, required
from slurmft.train.data.tables import TokenTable
from slurmft.train.data.token_data import TokenData
from slurmft.train.login.cells import (
    Labels,
    label_ids,
    label_numbers,
    names_of_numbers,
)
from slurmft.train.login.formats import format_of
from slurmft.train.login.sentence_modules import LIBRARY
from slurmft.train.login.sources import no_padding
from slurmft.train.login.validation_part import (
    VALIDATION,
    Part,
    has_validation,
    splits_of_data,
)
from slurmft.train.task_facts import TASKS
from slurmft.train.tasks.base import Task, set_dropout, set_dropout_of_modules
from slurmft.train.tasks.hub import Loaded, Rows, Source, from_hub

_SHARED_CODE = (
    "data/tables.py",
    "data/token_data.py",
    "login/cells.py",
    "login/chats.py",
    "login/formats.py",
    "login/rows.py",
    "login/validation_part.py",
)
"""Code that decides the tokens, besides this folder's."""
_WITHOUT_TABLE_OF_TYPES = ("funnel", "xlnet")
"""Models that see of two tokens only whether they are of one text: their configurations name no
number of types."""
_ROWS_AT_ONCE = 10_000
"""Rows that the tokenizer gets: its lists of a whole split would take gigabytes."""


class Pretrained(Task):
    """Base class of tasks that load their rows, tokenizer and model."""

    hub_subset: str | None = None
    """Name of one of the data sets that a hub id stands for."""
    known_labels: list[str] | None = None
    """Names of the classes, where a split is read that does not say which there are."""
    needs_offsets: bool = False
    """The tokenizer must tell which words and characters its tokens are of."""
    names_padding: bool = True
    """The model's configuration gets the token of padding, where it names none."""
    limits_by_configuration: bool = False
    """Texts have no more tokens than the configuration names positions, also where the model has no
    table of them, as with rotary embeddings."""
    is_mixed: bool = False
    """The data is a source of --mix: its classes are those of --data."""
    _label_type = "str"

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.form = format_of(config)
        self.notes: list[str] = []
        self.warnings: list[str] = []
        """Remarks on the data, see `TokenData`."""

    # --- data -------------------------------------------------------------------------------------

    def prepare(self) -> TokenData:
        """Reads and tokenizes all splits.

        Raises:
            UsageError: no such data, model or column; a value that cannot be right; nothing to
                learn.
        """
        tokenizer = self.tokenizer()
        # MNLI has two validation splits; they become one table, see `TokenData.sizes`.
        train, *validation = [self.rows(split) for split in self.facts.splits]
        names = self._in_order_of_model(self.label_names(train))
        train_tables = [self.training_table(tokenizer, train, names)]
        train_tables += [source.mixed_table(names) for source in self.mixed_sources()]
        source_sizes: tuple[int, ...] = ()
        if self.config.mix:
            source_sizes = tuple(len(table) for table in train_tables)
        validation_tables = [self.table(tokenizer, rows, names) for rows in validation]
        return TokenData(
            train=self.joined(train_tables),
            validation=TokenTable.joined(validation_tables),
            labels=names,
            label_type=self._label_type,
            pad_id=tokenizer.pad_token_id,
            sizes=tuple(len(table) for table in validation_tables),
            source_sizes=source_sizes,
            max_length=self._max_length(tokenizer),
            texts=self.texts(validation[0]),
            notes=tuple(self.notes),
            warnings=tuple(self.warnings),
        )

    def table(self, tokenizer: Any, rows: Rows, names: list[str]) -> TokenTable:
        """Returns the tokens of a split with their labels; here of texts, or pairs of texts."""
        labels = self.labels(rows, names)
        # Labels come last, in a column or in several: texts are the first or the first two.
        text_columns = 1
        if self.config.text_pair_column:
            text_columns = 2
        texts = self.values(rows)[:text_columns]
        ids, types = self.encode(tokenizer, texts, f"texts of {rows.where!r}")
        return TokenTable.build(ids, labels, types)

    def training_table(
        self, tokenizer: Any, rows: Rows, names: list[str]
    ) -> TokenTable:
        """Returns the `table` of the training data; a task may label it otherwise than others."""
        return self.table(tokenizer, rows, names)

    def mixed_sources(self) -> "list[Pretrained]":
        """Returns a task for each source of --mix, which reads its rows and makes their table."""
        sources = []
        for config in self.config.sources()[1:]:
            task_class = type(self)
            if config.task != self.config.task:
                task_class = plugins.get(plugins.TASKS, config.task, "--task").load()
            source: Pretrained = task_class(config)
            source.is_mixed = True
            # The same lists, no copies: what a source finds in its rows is said of the run.
            source.notes = self.notes
            source.warnings = self.warnings
            sources.append(source)
        return sources

    def mixed_table(self, names: list[str]) -> TokenTable:
        """Returns the table of a source of --mix, `names` being those of the classes of --data."""
        rows = self.rows(self.facts.splits[0])
        # Its own check of the tokenizer says what is missing, as a chat template.
        return self.training_table(self.tokenizer(), rows, names)

    def joined(self, tables: Sequence[TokenTable]) -> TokenTable:
        """Returns the training samples of several sources, one source after the other.

        Raises:
            UsageError: a table has arrays of which only its task knows how they are joined.
        """
        if len(tables) > 1 and any(table.extra for table in tables):
            raise UsageError(
                f"--mix cannot be used with --task {self.config.task}: its tables have arrays of "
                "their own (extra)",
                "leave --mix out, or write joined() of the task",
            )
        return TokenTable.joined(tables)

    def unlabelled(self, tokenizer: Any, texts: Sequence[list[Any]]) -> TokenTable:
        """Returns the tokens of rows that are to be predicted."""
        ids, types = self.encode(tokenizer, texts, "texts")
        return TokenTable.build(ids, [0] * len(ids), types)  # a label that nobody reads

    def texts(self, validation: Rows) -> Any:
        """Returns what the metrics need of the validation split besides, see `TokenData.texts`."""

    def rows(self, split: str) -> Rows:
        """Returns a split's rows; UsageError where there is no such split, or it has none."""
        part = Part.of(self.config, split)
        if part is None:
            return self._source.rows(split, self.form.columns)
        return self._rows_of_part(part)

    def _rows_of_part(self, part: Part) -> Rows:
        """Returns the rows of the training data that are of a part of it."""
        rows = self.rows_to_divide()
        # All of them, so that messages have the numbers of rows in the data.
        values = self.values(rows)
        classes = self.form.classes(values)
        if classes is not None:
            Labels(rows.where, classes).check_empty()
        groups = self.form.groups(values)
        is_chosen = part.rows(len(rows), classes, groups, rows.where)
        if part.is_validation:
            count = f"{sum(is_chosen):,} of the {len(rows):,} rows of {rows.where!r}"
            self.notes.append(f"validation: {count}, {part.description(classes)}")
        return rows.chosen(is_chosen, self.form.columns)

    def rows_to_divide(self) -> Rows:
        """Returns the rows of the training data, of which --validation-fraction takes some.

        Raises:
            UsageError: there is a validation split already; or as `rows`.
        """
        self._check_divided()
        return self._source.rows(self.facts.splits[0], self.form.columns)

    def _check_divided(self) -> None:
        """Raises UsageError where there is the split that --validation-fraction is to make."""
        if self._source.has(VALIDATION):
            raise has_validation(self.config, self._source.name)

    @property
    def _source(self) -> Source:
        flag = "--data"
        if self.is_mixed:
            flag = "--mix"
        return Source(str(self.config.data), self.hub_subset, flag)

    def values(self, rows: Rows) -> list[list[Any]]:
        """Returns the columns that the task reads, in the order of its format.

        Raises:
            UsageError: a column is missing, or a value cannot be right.
        """
        columns = [rows.column(name) for name in self.form.columns]
        self.form.check(columns, rows.where)
        return columns

    # --- labels -----------------------------------------------------------------------------------

    def label_names(self, train: Rows) -> list[str]:
        """Returns the names of the classes; none where labels are no classes.

        They are those that the task has, else those that the data set has for its classes, else the
        labels themselves.
        """
        if not self.form.has_classes:
            return []
        label_column = self.form.columns[-1]
        names_in_data = self.form.names or train.names.get(label_column)
        names = self.known_labels or self.facts.labels or names_in_data
        if names:
            return list(names)
        return self.found_labels(train)

    def _in_order_of_model(self, names: list[str]) -> list[str]:
        """Returns names of classes in the order of the model's head, where it has one for classes
        of these names: training goes on from what it knows."""
        if not names:
            return names
        of_model = self._classes_of_model()
        if sorted(of_model) == sorted(names):
            return of_model
        return names

    def _classes_of_model(self) -> list[str]:
        """Returns the names of the classes that the model has a head for, by number; of a model
        without one, transformers makes some up."""
        from transformers import AutoConfig

        model_config = self.load(AutoConfig.from_pretrained)
        id2label = getattr(model_config, "id2label", None) or {}
        return [id2label[number] for number in sorted(id2label)]

    def found_labels(self, train: Rows) -> list[str]:
        """Returns the labels that occur in a split."""
        labels = Labels(train.where)
        values = self.values(train)
        labels.add(self.form.labels(values))
        part = Part.of(self.config, self.facts.splits[0])
        description = ""
        if part is not None:
            description = part.description(self.form.classes(values))
        names = labels.names(description)
        self._label_type = labels.type_name
        return names

    def labels(self, rows: Rows, names: list[str]) -> list[Any]:
        """Returns a split's labels: numbers of classes or, without `names`, numbers.

        Raises:
            UsageError: a label is missing, of the wrong type, or no class.
        """
        column = self.form.columns[-1]
        values = rows.column(column)
        if not names:
            return label_numbers(values, rows.where)
        labels = Labels(rows.where, values)
        labels.check_empty()
        # of local data the submission has warned
        if not is_local(str(self.config.data)):
            for remark in labels.oddities():
                warnings.warn(remark, SlurmftWarning, stacklevel=2)
        return self.class_ids(values, names, rows, rows.where, rows.numbers)

    def class_ids(
        self,
        labels: Sequence[Any],
        names: list[str],
        rows: Rows,
        where: str,
        row_numbers: Sequence[int] | None = None,
    ) -> list[int]:
        """Returns the numbers of classes that labels of a split are; raises as `labels`.

        Args:
            rows: those of the split, which may have names for its numbers.
            where: what has the labels, in messages.
            row_numbers: numbers of the rows of the labels; None: 1, 2, and so on.
        """
        # Only where the task or the data set says what a number stands for.
        numbered: Sequence[str] | None = rows.names.get(self.form.columns[-1])
        by_number = self.facts.labels is not None or numbered is not None
        # The model may have the classes of the task in another order.
        numbered = numbered or self.facts.labels
        if numbered is not None and not self.is_mixed:
            numbered = names_of_numbers(numbered, names)
        return label_ids(labels, names, where, by_number, row_numbers, numbered)

    # --- tokens -----------------------------------------------------------------------------------

    @property
    def prefix(self) -> str:
        """The words before every text; "": none."""
        return self.config.source_prefix or ""

    def longest(self, tokenizer: Any) -> int:
        """Returns the most tokens of a sample: those of --max-length, fewer where the model takes
        no more."""
        return min(
            int(required(self.config, "max_length")),
            int(tokenizer.model_max_length),
            self.positions,
        )

    def _max_length(self, tokenizer: Any) -> int | None:
        """Returns the `longest` sample, with a note where --max-length is more; None where there is
        no --max-length."""
        if self.config.max_length is None:
            return None
        longest = self.longest(tokenizer)
        if longest < self.config.max_length:
            self.notes.append(
                f"--max-length {self.config.max_length}: the model takes {longest} tokens, which "
                "is the length that is used"
            )
        return longest

    @functools.cached_property
    def positions(self) -> int:
        """Tokens of a text that the model has positions for. Many tokenizers do not say it."""
        import torch
        from transformers import AutoModel

        from slurmft.train.engine.packing import position_limits  # it imports torch

        model_config = self._configuration()
        try:
            with torch.device("meta"):  # modules without weights
                model = AutoModel.from_config(model_config, trust_remote_code=False)
            most, _ = position_limits(model)
        except ValueError:  # a configuration of no base model
            most = sys.maxsize
        named = getattr(model_config, "max_position_embeddings", None)
        # XLNet's is -1: it has no limit.
        if self.limits_by_configuration and named and named > 0:
            most = min(most, named)
        return most

    def encode(
        self,
        tokenizer: Any,
        texts: Sequence[list[str]],
        what: str,
        as_target: bool = False,
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Tokenizes texts, or pairs of texts.

        Args:
            texts: one column of texts, or two.
            what: the texts, in warnings.
            as_target: the texts are targets: they have no `prefix`, and are cut to
                --max-target-length in place of --max-length.

        Returns:
            Token ids of every row; and the number of its text for each token, where there are two
            texts and the model tells them apart.
        """
        if as_target:
            arguments: tuple[str, ...] = ("text_target",)
            prefix = ""
            limit = int(required(self.config, "max_target_length"))
            longest = min(limit, tokenizer.model_max_length)
        else:
            arguments = ("text", "text_pair")
            prefix = self.prefix
            longest = self.longest(tokenizer)
        is_cut: list[bool] = []
        ids: list[np.ndarray] = []
        types: list[np.ndarray] = []
        for start in range(0, len(texts[0]), _ROWS_AT_ONCE):
            part = [column[start : start + _ROWS_AT_ONCE] for column in texts]
            if prefix:  # as of T5: "summarize: "
                part = [[prefix + text for text in column] for column in part]
            named = dict(zip(arguments, part, strict=False))
            encoded = tokenizer(**named, truncation=True, max_length=longest)
            is_cut += are_cut(encoded)
            # Arrays at once: lists of Python's numbers take several times their room.
            for row in filled(encoded["input_ids"], tokenizer.pad_token_id):
                ids.append(np.asarray(row, dtype=np.int32))
            for row in filled(encoded.get("token_type_ids", ()), 0):
                types.append(np.asarray(row, dtype=np.int8))
        self.warn_of_cuts(tokenizer, is_cut, what, longest)
        # One token of Funnel's and XLNet's has a type of its own in a single text, too.
        are_told_apart = any(numbers.any() for numbers in types)
        if are_told_apart and self.tells_texts_apart(tokenizer):
            return ids, types
        return ids, None

    def warn_of_cuts(
        self, tokenizer: Any, is_cut: Sequence[bool], what: str, longest: int
    ) -> None:
        """Adds a warning of how many texts are longer than what is kept of them."""
        if any(is_cut):
            count = f"{sum(is_cut):,} of {len(is_cut):,} {what}"
            part = "ends"
            if tokenizer.truncation_side == "left":
                part = "beginnings"
            self.warnings.append(
                f"{count} are cut to {longest} tokens: their {part} are not seen"
            )

    def sources(self) -> dict[str, Any] | None:
        """Returns what decides the tokens: data, tokenizer, settings, and the code that makes them.

        None where data or code is in no files that could be compared.
        """
        if self.config.task not in TASKS:  # own code may import what changes
            return None
        # Tokens that are kept may be those of other data with the same training rows.
        if self.config.validation_fraction is not None:
            self._check_divided()
        data = [self._source.files(split) for split in splits_of_data(self.config)]
        mixed = self.mixed_sources()
        for source in mixed:
            data.append(source._source.files(source.facts.splits[0]))
        if not all(data):
            return None
        here = Path(__file__).parent
        code = [here.parent / name for name in _SHARED_CODE]
        code += sorted(here.glob("*.py"))
        # The tokenizer's own files may be in several places; saved ones are all there is.
        with tempfile.TemporaryDirectory(dir=temporary_place()) as folder:
            self.save_tokenizer(Path(folder))
            tokenizer = {}
            for path in Path(folder).iterdir():
                tokenizer[path.name] = fingerprint(path)
        data_of_splits = []
        for files in data:
            # By content, not by name: a copy of the data elsewhere gives the same tokens.
            data_of_splits.append(
                [(path.suffixes, fingerprint(path)) for path in files]
            )
        return {
            "settings": _settings(self.config),
            "data": data_of_splits,
            # By which columns and presets, not by which name and share.
            "mix": [_settings(source.config) for source in mixed],
            "tokenizer": tokenizer,
            "types": self.tells_texts_apart(self.tokenizer()),
            "classes": self._classes_of_model(),
            "longest": self.longest(self.tokenizer()),
            "code": [(path.name, fingerprint(path)) for path in code],
            "versions": [
                version(name) for name in ("transformers", "tokenizers", "pyarrow")
            ],
        }

    # --- tokenizer and model ----------------------------------------------------------------------

    def tokenizer(self) -> Any:
        """Returns the model's tokenizer; UsageError where there is none, or it lacks something."""
        from transformers import AutoConfig, AutoTokenizer

        tokenizer = self.load(AutoTokenizer.from_pretrained)
        model_config = self.load(AutoConfig.from_pretrained)
        pad_token = tokenizer.pad_token
        pad_id = tokenizer.pad_token_id
        is_unknown = is_beyond(pad_id, model_config)
        if pad_id is None or is_unknown:
            # GPT-2 and Llama are published without one. Padding is masked: any token will do.
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None or is_beyond(
            tokenizer.pad_token_id, model_config
        ):
            raise no_padding(self.config.model)
        if is_unknown:
            self._note_once(
                f"the tokenizer's padding token {pad_token!r} is token {pad_id:,}, but the model "
                f"knows {model_config.get_text_config().vocab_size:,} tokens only: "
                f"{tokenizer.pad_token!r} pads"
            )
        if has_sparse_blocks(model_config):
            self._note_once(
                "the model attends to blocks of tokens (block_sparse), in transformers until the "
                "first batch of short texts: it has full attention here from the start, and so "
                "has the saved model"
            )
        if self.needs_offsets and not tokenizer.is_fast:
            what = f"the tokenizer of {self.config.model!r}"
            raise UsageError(f"{what} does not tell where tokens are")
        return tokenizer

    def _note_once(self, note: str) -> None:
        """Notes what is seen with each load of the tokenizer."""
        if note not in self.notes:
            self.notes.append(note)

    def save_tokenizer(self, folder: Path) -> None:
        tokenizer = self.tokenizer()
        if self.facts.library == LIBRARY:
            # It cuts texts as they were cut here.
            tokenizer.model_max_length = self.longest(tokenizer)
            # By a chat template it would write them as messages, as no text was here.
            tokenizer.chat_template = None
        if not self.tells_texts_apart(tokenizer):
            # The saved model gets what it was trained on, as GPT-2 with BERT's tokenizer.
            names = [n for n in tokenizer.model_input_names if n != "token_type_ids"]
            tokenizer.model_input_names = names
            # Only what is among these is written.
            tokenizer.init_kwargs["model_input_names"] = names
        tokenizer.save_pretrained(folder)

    def tells_texts_apart(self, tokenizer: Any) -> bool:
        """Returns whether tokens of two texts get types.

        The tokenizer must give them and the model must have them: there are tokenizers in use that
        give types for models that refuse them.
        """
        from transformers import AutoConfig

        if "token_type_ids" not in tokenizer.model_input_names:
            return False
        model_config = self.load(AutoConfig.from_pretrained)
        if model_config.model_type in _WITHOUT_TABLE_OF_TYPES:
            return True
        return getattr(model_config, "type_vocab_size", 0) > 1

    def pretrained(self, auto_model: Any, **settings: Any) -> Any:
        """Loads the weights with a head, in fp32, on the CPU.

        Args:
            auto_model: class of transformers that has the head.
            settings: values of the model's configuration.
        """
        import torch

        from slurmft.train.engine import lora  # it imports torch

        model_config = self._configuration(**settings)
        # transformers has no such setting; a base that was trained here may have another one.
        if "label_type" in settings or hasattr(model_config, "label_type"):
            model_config.label_type = settings.get("label_type", "str")
        set_dropout(model_config, self.config.dropout)
        # Loading sets it to that of the loaded weights.
        stored_dtype = dtype_of(model_config)
        model, loading = self.load(
            auto_model.from_pretrained,
            config=model_config,
            dtype=torch.float32,
            use_safetensors=True,  # others are pickles
            # a head of another task gives way to a new one
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **lora.quantization(self.config),
        )
        set_dropout_of_modules(model, self.config.dropout)
        # new weights, which LoRA trains whole
        model.missing_keys = loading["missing_keys"]
        model.stored_dtype = stored_dtype
        self._name_padding(model)
        return model

    def _configuration(self, **settings: Any) -> Any:
        """Returns the model's configuration, of which a model can be made."""
        from transformers import AutoConfig

        model_config = self.load(AutoConfig.from_pretrained, **settings)
        text_config = model_config.get_text_config()
        # A table of embeddings cannot be made with it.
        if is_beyond(getattr(text_config, "pad_token_id", None), model_config):
            text_config.pad_token_id = None
        # transformers computes a batch of short texts by full attention, and from then on all.
        if has_sparse_blocks(model_config):
            model_config.attention_type = "original_full"
        return model_config

    def _name_padding(self, model: Any) -> None:
        """Tells a model the token of padding, where its configuration does not.

        Decoders are published without it, and their heads for classes look for the last token
        before the padding. After loading: a table of embeddings that is made with it would not
        train that token.
        """
        text_config = model.config.get_text_config()
        names_one = getattr(text_config, "pad_token_id", None) is not None
        if names_one or not self.names_padding:
            return
        text_config.pad_token_id = self.tokenizer().pad_token_id

    def load(self, load: Callable[..., Loaded], **settings: Any) -> Loaded:
        """Returns what a `from_pretrained` of transformers loads for --model."""
        name = str(required(self.config, "model"))

        def load_by_name() -> Loaded:
            # Without a decision on remote code transformers may ask, where there is no terminal.
            return load(name, trust_remote_code=False, **settings)

        loaded = from_hub("--model", name, load_by_name)
        refuse_kernels(loaded, name)
        return loaded


def refuse_kernels(loaded: Any, name: str) -> None:
    """Refuses the configuration of a model that names code of the hub for its attention or its
    experts: transformers would fetch it and execute it, whatever is decided on remote code.

    Raises:
        UsageError: it does.
    """
    configs = [loaded]
    for part in getattr(loaded, "sub_configs", ()):
        configs.append(getattr(loaded, part, None))
    for config in configs:
        for kind in ("attn_implementation", "experts_implementation"):
            implementation = str(getattr(config, f"_{kind}", None))
            # Those that come with transformers have no slash: REPOSITORY/NAME is one of the hub.
            if "/" in implementation:
                raise UsageError(
                    f"--model {name!r}: its config.json names code of the hub, which is never "
                    f"executed: {kind} {implementation!r}",
                    "take that out of the config.json of a copy",
                )


def is_beyond(token: int | None, model_config: Any) -> bool:
    """Returns whether a model has no row for a token in its table of embeddings, as of one that
    was added to the tokenizer alone."""
    rows = getattr(model_config.get_text_config(), "vocab_size", None)
    return token is not None and rows is not None and token >= rows


def has_sparse_blocks(model_config: Any) -> bool:
    """Returns whether a model attends to blocks of tokens, as BigBird."""
    return getattr(model_config, "attention_type", None) == "block_sparse"


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the options that decide the tokens."""
    settings = {}
    for name, declared in options(TrainConfig).items():
        if declared.decides_tokens:
            settings[name] = getattr(config, name)
    return settings


def dtype_of(model_config: Any) -> Any:
    """Returns the type of the stored weights, as a model's configuration names it; None: it does
    not."""
    import torch

    dtype = getattr(model_config, "dtype", None)
    if dtype is None:  # transformers 4
        dtype = getattr(model_config, "torch_dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return dtype


def filled(rows: Iterable[Any], token: int | None) -> Iterator[Any]:
    """Yields rows of numbers, with `token` alone for those without any.

    A text may have no tokens, where the tokenizer puts none before or behind it; a model takes at
    least one, and of a batch that is padded it would get padding.
    """
    for row in rows:
        if len(row):
            yield row
        else:
            yield [token]


def are_cut(encoded: Any) -> list[bool]:
    """Returns for each text that a fast tokenizer encoded whether tokens of it were left out."""
    return [bool(encoding.overflowing) for encoding in encoded.encodings or ()]
