"""Checks of --model and --data where they are local folders, before the job waits in a queue."""

import contextlib
import dataclasses
import importlib.util
import os
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmft.core import interpreter
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.files import other_kind, read_json
from slurmft.core.filesystem import absolute
from slurmft.core.hub import (
    check_id,
    datasets_cache,
    hub_cache,
    is_hub_id,
    is_hub_offline,
    is_local,
)
from slurmft.core.options import flag, options
from slurmft.core.text import some
from slurmft.core.trusted import other_owner
from slurmft.core.users import user_name
from slurmft.train import ipex, metric_spec
from slurmft.train.config import TrainConfig, frozen_layers
from slurmft.train.login.formats import format_of
from slurmft.train.login.model_files import folders_of, tokenizer_file
from slurmft.train.login.rows import as_argument, cure_of_json, cure_of_words, files_of
from slurmft.train.login.validation_part import (
    VALIDATION,
    has_validation,
    splits_of_data,
)
from slurmft.train.own_task import facts
from slurmft.train.recipes import fill, presets
from slurmft.train.task_facts import TASKS

SUFFIXES = (
    ".jsonl",
    ".jsonl.gz",
    ".csv",
    ".csv.gz",
    ".tsv",
    ".tsv.gz",
    ".parquet",
    ".arrow",
    ".txt",
    ".txt.gz",
)


def suffix_of(name: str) -> str | None:
    """Returns the ending of a file of rows, as `SUFFIXES` has it, whatever its case; None: it is no
    file of rows."""
    fitting = [suffix for suffix in SUFFIXES if name.lower().endswith(suffix)]
    return max(fitting, key=len, default=None)


_LAYER_COUNTS = ("num_hidden_layers", "n_layers", "n_layer")
"""Names of the number of layers in configurations of models."""


def localize(train: TrainConfig) -> TrainConfig:
    """Returns the configuration with local folders made absolute: nodes start elsewhere.

    Raises:
        UsageError: a folder does not exist, or lacks the files of a model or a data set.
    """
    changes: dict[str, Any] = {}
    # Ids of the hub stay as they are: ranks load them by name.
    check_given(train)
    if train.data is not None and is_local(train.data):
        folder = folder_of_task(_folder("--data", train.data), train.task)
        _check_splits(train, folder)
        changes["data"] = str(folder)
    _check_data_seed(train)
    for source in train.sources():
        _check_columns(source)
    changes["mix"] = tuple(_localized_mix(train))
    if train.model is not None and is_local(train.model):
        folder = _folder("--model", train.model)
        _check_model(train, train.model, folder)
        changes["model"] = str(folder)
    if train.model is not None and facts(train.task).splits:
        _check_special_tokens(train)
    metrics = []
    for text in train.metric:
        # A folder of the name of a metric of the task is another: its path has a slash.
        if text in train.named_metrics:
            text = metric_spec.localized(text)
        metrics.append(text)
    changes["metric"] = tuple(metrics)
    return dataclasses.replace(train, **changes)


def _check_data_seed(train: TrainConfig) -> None:
    """Raises UsageError where nothing is drawn by --data-seed; a task of the user's own may draw
    something."""
    if train.validation_fraction is not None or train.mix or train.task not in TASKS:
        return
    if options(TrainConfig)["data_seed"].is_set(train.data_seed):
        raise UsageError(
            f"--data-seed {train.data_seed} draws nothing without --validation-fraction or --mix",
            "leave it out; the order of the training data is that of --seed",
        )


def _check_columns(train: TrainConfig) -> None:
    """Raises UsageError where a task does not read a column, or one is to hold two things."""
    flags: dict[str, str] = {}
    named = list(_columns(train))
    read: tuple[str, ...] = ()
    # Runs that name no column need no format.
    if named and facts(train.task).splits:
        read = format_of(train).columns
    for column, name in named:
        if train.task in TASKS and column not in read:
            what = f"{name} {column} cannot be used with --task {train.task}"
            # What is read may be that of another preset.
            if len(presets(train.task)) > 1:
                what += f" --preset {train.preset}"
            raise UsageError(f"{what}, which does not read it", "leave it out")
        if column in flags:
            raise UsageError(
                f"{name} {column} is the column of {flags[column]}, too",
                "name a column of its own (a copy of it, if both are to be the same)",
            )
        flags[column] = name


def _columns(train: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields each column that options name, with the flag of the option."""
    for name in options(TrainConfig):
        if not name.endswith("_column"):
            continue
        # Some take several names.
        for column in (getattr(train, name) or "").split(","):
            if column.strip():
                yield column.strip(), flag(name)


def check_in_cache(train: TrainConfig) -> None:
    """Raises UsageError where a model, or data of a built-in task, is no folder, in no cache, and
    cannot be downloaded."""
    if not is_hub_offline():
        return
    model = train.model
    if model is not None and not is_local(model) and not folders_of(model):
        raise _in_no_cache("--model", model, hub_cache(), f"slurmft fetch {model}")
    # A task of the user's own may read its data by other means.
    if train.task not in TASKS:
        return
    named = [("--mix", spec.name) for spec in train.mixed]
    if train.data is not None:
        named.insert(0, ("--data", train.data))
    for flag_name, name in named:
        if not is_local(name) and not _data_in_cache(name):
            fetch = fetch_command(train)
            raise _in_no_cache(flag_name, name, datasets_cache(), fetch)


def fetch_command(train: TrainConfig) -> str:
    """Returns the command that downloads what a run loads, as a user types it."""
    words = ["slurmft", "fetch", train.model or "MODEL"]
    if train.data is not None:
        words.append(train.data)
    words += ["--task", train.task]
    default = fill({"task": train.task})
    recipe = fill({"task": train.task, "preset": train.preset})
    for name, each in options(TrainConfig).items():
        value = getattr(train, name)
        # The preset itself is not the one that it has by default.
        usual = (default if name == "preset" else recipe).get(name)
        if "fetch" not in each.commands or not each.is_set(value) or value == usual:
            continue
        values = value if each.is_repeatable else (value,)
        for one in values:
            words += [each.flag, str(one)]
    return shlex.join(words)


def _in_no_cache(flag_name: str, name: str, cache: Path, fetch: str) -> UsageError:
    return UsageError(
        f"{flag_name} {name!r} is no folder here and not in the cache {str(cache)!r}, and "
        "HF_HUB_OFFLINE is set",
        f"give its folder, or fetch it where there is internet: HF_HUB_OFFLINE=0 {fetch}",
    )


def _data_in_cache(name: str) -> bool:
    """Returns whether the datasets library has loaded a data set of the hub before; True where its
    cache is closed to this user."""
    if not os.access(datasets_cache(), os.R_OK | os.X_OK):
        return datasets_cache().exists()
    # The library writes capitals as _ and a small letter.
    key = _cache_key(name.replace("/", "___"))
    return any(_cache_key(each) == key for each in os.listdir(datasets_cache()))


def _cache_key(folder_name: str) -> str:
    return folder_name.replace("_", "").lower()


def warn_of_near_folders(train: TrainConfig) -> None:
    """Warns where --data is a name of the hub, and almost that of a folder here."""
    if train.data is None or is_local(train.data):
        return
    import difflib  # 3 ms: folders need it not

    place = Path(train.data).parent
    folders = []
    with contextlib.suppress(OSError):
        folders = [str(path) for path in place.iterdir() if path.is_dir()]
    # Nearer than in other messages: most names of the hub are right.
    for near in difflib.get_close_matches(train.data, folders, n=1, cutoff=0.85):
        warnings.warn(
            f"--data {train.data!r} is no folder here, so the job takes it from the hub; did you "
            f"mean {near}?",
            SlurmftWarning,
            stacklevel=2,
        )


def check_splits_in_cache(train: TrainConfig) -> None:
    """Raises UsageError where a data set of the hub, as it is in the cache, lacks a split, or has
    the one that is to be made."""
    name = str(train.data)
    if train.data is None or is_local(name):
        return
    of_versions = _splits_in_cache(name)
    if not of_versions:
        return
    # What holds for all versions in the cache counts.
    in_any = set.union(*of_versions)
    for split in splits_of_data(train):
        if split not in in_any:
            raise NoSplitError(
                f"--data {name!r} has no {split} split in the cache",
                split,
                f"it has {some(sorted(in_any))}",
            )
    in_all = set.intersection(*of_versions)
    if train.validation_fraction is not None and VALIDATION in in_all:
        raise has_validation(train, name)


def _splits_in_cache(name: str) -> list[set[str]]:
    """Returns the names of the splits of each version of a data set in the cache; none where a hub
    id stands for several, as GLUE's: which of them a task reads is not known here."""
    folder = datasets_cache() / name.replace("/", "___") / "default"
    try:
        files = sorted(folder.glob("*/*/dataset_info.json"))
    except PermissionError:  # the job says what is closed to it
        return []
    infos = [read_json(file) or {} for file in files]
    return [set(info["splits"]) for info in infos if info.get("splits")]


def _localized_mix(train: TrainConfig) -> Iterator[str]:
    """Yields the values of --mix with absolute paths of folders; raises as `localize`."""
    main, *sources = train.sources()
    for spec, source in zip(train.mixed, sources, strict=True):
        _check_kind(main, source, spec.text)
        if is_local(spec.name):
            folder = folder_of_task(_folder("--mix", spec.name), source.task)
            find_split(folder, facts(source.task).splits[0])
            spec = dataclasses.replace(spec, name=str(folder))
        yield spec.text


def _check_kind(main: TrainConfig, source: TrainConfig, text: str) -> None:
    """Raises UsageError where rows of a source are samples of another kind than those of --data.

    Args:
        text: the value of --mix.
    """
    if format_of(main).kind != format_of(source).kind:
        raise UsageError(
            f"--mix {text!r}: its rows have not the kind that --task {main.task} reads of --data: "
            f"preset {source.preset}, not {main.preset}",
            "mix rows of one kind, with as many texts each, and scores in all or in none",
        )


def _check_splits(train: TrainConfig, folder: Path) -> None:
    """Raises UsageError where a folder lacks a split, or has one that is to be made."""
    for split in splits_of_data(train):
        find_split(folder, split)
    if train.validation_fraction is None:
        return
    files = _files_of_split(folder, VALIDATION)
    if files:
        raise has_validation(train, str(files[0]))
    file = find_split(folder, facts(train.task).splits[0])
    # Among all endings: a .txt.gz is one, too.
    if ".txt" in Path(file.name.lower()).suffixes:
        raise UsageError(
            f"--validation-fraction takes rows, and {str(file)!r} is one text",
            "divide it into train.txt and validation.txt, or write it as a .jsonl of documents",
        )


def notes_of_names(train: TrainConfig) -> list[str]:
    """Returns what to know of files of --data that are not read, though they have a name of a
    split: dev.csv beside validation.csv."""
    notes = []
    folder = absolute(str(train.data))
    splits = list(facts(train.task).splits)
    if may_have_test(train):
        splits.append("test")
    for split in splits:
        files = _files_so_named(folder, split)
        others = [
            path for path in _files_by_another_name(folder, split) if path not in files
        ]
        if files and others:
            names = some([repr(path.name) for path in others])
            notes.append(f"{str(files[0])!r} is the {split} split: {names} is not read")
    return notes


def check_hub_names(train: TrainConfig) -> None:
    """Checks in a job that what was a name of the hub at the submission still is none of a file;
    raises UsageError."""
    if train.model is not None:
        check_id("--model", train.model)
    main, *mixed = train.sources()
    if main.data is not None:
        check_id("--data", main.data)
    for source in mixed:
        check_id("--mix", str(source.data))


def _folder(flag: str, name: str) -> Path:
    path = absolute(name)
    other_user = other_owner(path)
    if is_hub_id(name) and other_user:
        warnings.warn(
            f"{flag} {name!r} is {str(path)!r} here, which belongs to {other_user}, not what the "
            "hub has by that name",
            SlurmftWarning,
            stacklevel=2,
        )
    if path.is_file() and flag == "--data":
        suffix = suffix_of(path.name)
        if suffix is None:
            raise no_data_file(path)
        folder = path.name[: -len(suffix)]
        make = shlex.join(["mkdir", folder])
        copy = shlex.join(["cp", name, f"{folder}/train{suffix}"])
        raise UsageError(
            f"{flag} {name!r} is a file: it takes the folder that holds the splits",
            f"{make}; {copy}; then: --data {shlex.quote(folder)} --validation-fraction 0.1, "
            "which takes the validation rows from it",
        )
    if not path.is_dir():
        hint = "give a folder that exists, or a hub id"
        problem = "no such folder"
        other = other_kind(path)
        if other:
            problem = f"it is {other}, and no folder"
        raise UsageError(f"{flag} {name!r}: {problem}", hint)
    return path


def no_data_file(path: Path) -> UsageError:
    """Returns the error for a file of a kind that nothing reads."""
    hint = f"give one of {', '.join(SUFFIXES)}"
    ending = path.suffix.lower()
    if ending in _SPREADSHEETS:
        hint = f"open it, and save it as CSV (UTF-8): {path.stem}.csv"
    elif ending in _UNPACK:
        hint = _unpacking(path)
    return UsageError(f"{str(path)!r} is no file of rows", hint)


# --- models ---------------------------------------------------------------------------------------


def _check_model(train: TrainConfig, name: str, folder: Path) -> None:
    """Raises UsageError where a folder lacks what transformers loads a model from."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise UsageError(
                f"--model {name!r} holds an adapter of PEFT, and no config.json",
                "merge the adapter into its model (--merge, in the run that trains it)",
            )
        raise UsageError(
            f"--model {name!r} holds no config.json",
            "give a folder that save_pretrained wrote",
        )
    check_no_adapter(f"--model {name!r}", folder)
    # A large model has several, and an index; one of them tells the format.
    if not any(folder.glob("*.safetensors")):
        if any(folder.glob("*.bin")):
            raise no_safetensors(name)
        raise UsageError(
            f"--model {name!r} holds no weights (*.safetensors)",
            "give a folder that save_pretrained wrote",
        )
    if train.freeze:
        _check_layers(train.freeze, folder)
        _check_has_head(train, folder)
    if train.preset == "chat" and not _has_chat_template(folder):
        raise no_chat_template(name)


def _check_layers(freeze: str, folder: Path) -> None:
    """Raises UsageError where --freeze names more layers than the configuration of a model has."""
    model_config = read_json(folder / "config.json") or {}
    # An encoder-decoder has those of both, under names of its own.
    if model_config.get("is_encoder_decoder"):
        return
    count = frozen_layers(freeze) or 0
    for name in _LAYER_COUNTS:
        layers = model_config.get(name)
        # Where a configuration has none of these names, the job finds out.
        if isinstance(layers, int) and count > layers:
            raise UsageError(
                f"--freeze {freeze}: the model has {layers} layers",
                f"give at most layers:{layers}",
            )


def _check_has_head(train: TrainConfig, folder: Path) -> None:
    """Raises UsageError where --freeze base leaves nothing to train, as far as the files of a model
    tell; the job knows the rest."""
    if train.freeze != "base":
        return
    reason = None
    # Of sentence-transformers' modules, a Dense has weights.
    has_modules = (folder / "modules.json").is_file()
    if facts(train.task).predictions == "vectors" and not has_modules:
        reason = "it has no head"
    is_tied = (read_json(folder / "config.json") or {}).get("tie_word_embeddings")
    if facts(train.task).pipeline == "text-generation" and is_tied:
        reason = "its head is its table of embeddings"
    if reason:
        raise UsageError(
            f"--freeze base leaves nothing of --model {str(folder)!r} to train: {reason}",
            "freeze fewer layers, as --freeze layers:1",
        )


def check_no_adapter(model: str, folder: Path) -> None:
    """Raises UsageError where an adapter's configuration lies beside a whole model: transformers
    would load what that names.

    Args:
        model: the model, in messages.
    """
    file = folder / "adapter_config.json"
    is_whole = any(folder.glob("model*.safetensors*"))
    if is_whole and file.is_file():
        raise UsageError(
            f"{model} holds a whole model and, beside it, an {file.name}, by which transformers "
            "takes it for an adapter",
            f"if the model is meant: rm {shlex.quote(str(file))}",
        )


def no_safetensors(model: str) -> UsageError:
    """Returns the error for a model whose weights are pickles, or absent."""
    convert = (
        f"from transformers import AutoModel as M; "
        f"M.from_pretrained({model!r}, use_safetensors=False).save_pretrained('safe')"
    )
    return UsageError(
        f"--model {model!r} has no weights in safetensors; pickles (.bin) can run any code, and "
        "are not loaded",
        f"if you trust it: python -c {shlex.quote(convert)}, copy the tokenizer's files there, "
        "and give --model safe",
    )


_PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes whose special tokens are those that their files name; others have some by default."""


def _check_special_tokens(train: TrainConfig) -> None:
    """Raises UsageError where a tokenizer on this machine lacks a special token that one of our
    tasks needs."""
    file = tokenizer_file(str(train.model))
    if file is None or train.task not in TASKS:
        return
    tokens = read_json(file.with_name("tokenizer_config.json")) or {}
    if tokens.get("tokenizer_class") not in _PLAIN_TOKENIZERS:
        return
    # transformers 4 writes it besides.
    tokens |= read_json(file.with_name("special_tokens_map.json")) or {}
    # It ends texts, and pads them where there is no token for that.
    if tokens.get("eos_token"):
        return
    if not tokens.get("pad_token"):
        raise no_padding(train.model)
    if facts(train.task).pipeline == "text-generation":
        raise no_end(train.model)


def no_padding(model: str | None) -> UsageError:
    """Returns the error for a tokenizer with neither a token of padding nor one that may pad."""
    return UsageError(
        f"the tokenizer of {model!r} has no padding token, and no end-of-text token",
        "set pad_token in its tokenizer_config.json, to a token of its vocabulary that no text has",
    )


def no_end(model: str | None) -> UsageError:
    """Returns the error for a tokenizer that cannot end what a language model writes."""
    return UsageError(
        f"the tokenizer of {model!r} has no end-of-text token",
        "set eos_token in its tokenizer_config.json, to a token of its vocabulary",
    )


def _has_chat_template(folder: Path) -> bool:
    """Looks for a chat template in a file of its own, and in the tokenizer's configuration."""
    tokenizer_config = read_json(folder / "tokenizer_config.json") or {}
    # transformers writes null where there is none.
    has_one = bool(tokenizer_config.get("chat_template"))
    return has_one or any(folder.glob("*chat_template*"))


def no_chat_template(model: str | None) -> UsageError:
    """Returns the error for a model that is not one for chats."""
    return UsageError(
        f"the tokenizer of {model!r} has no chat template",
        "give a model for chats (often named -Instruct), put a chat_template.jinja beside the "
        "tokenizer, or give --preset completion with prompts and completions",
    )


def check_packages(train: TrainConfig) -> None:
    """Raises UsageError where the task or an option needs a package that is not installed."""
    if train.ipex:
        ipex.check_package()
    packages = {f"--task {train.task}": facts(train.task).packages}
    if train.lora:
        packages["--lora"] = ("peft",)
    if train.load_in_4bit:
        packages["--load-in-4bit"] = ("bitsandbytes",)
    check_installed(packages)
    if train.named_metrics and importlib.util.find_spec("evaluate") is None:
        # Most who type f1 or macro_f1 mean one that the task has.
        raise UsageError(
            f"--metric {train.named_metrics[0]!r} is none of the task, and the package "
            "evaluate is not installed",
            f"the task has {some(train.own_metrics)}; for others: "
            f"{shlex.quote(interpreter.PYTHON)} -m pip install evaluate",
        )


def check_installed(packages: dict[str, tuple[str, ...]]) -> None:
    """Raises UsageError where one of the packages that options need is not installed.

    Args:
        packages: the option -> names of packages.
    """
    for what, names in packages.items():
        # Looked for, not imported: some take seconds, and import torch.
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        if missing:
            projects = " ".join(missing).replace("_", "-")
            raise UsageError(
                f"{what} needs packages that are not installed: {projects}",
                f"leave it out, or {shlex.quote(interpreter.PYTHON)} -m pip install {projects}",
            )


# --- data -----------------------------------------------------------------------------------------


def check_given(train: TrainConfig) -> None:
    """Raises UsageError where a task generates no data, and is given none; or the reverse."""
    splits = facts(train.task).splits
    if train.data is not None and not splits:
        raise UsageError(
            f"--task {train.task} generates its data, and reads no --data {train.data!r}",
            "choose another --task, such as text-classification, or leave --data out",
        )
    if train.data is None and splits:
        problem = f"--task {train.task} needs data of your own"
        raise UsageError(problem, "give --data ID|DIR")


def folder_of_task(folder: Path, task: str) -> Path:
    """Returns the folder of a task within a folder of the data of several, as the hub has GLUE's
    tasks in one data set; a folder that has data itself stays as it is."""
    below = folder / task
    # MODULE:CLASS of a user's own task is no name of a folder.
    if not re.fullmatch(r"[\w-]+", task):
        return folder
    try:
        has_data_below = below.is_dir() and not _has_data(folder, task)
    except PermissionError:  # which `find_split` reports
        return folder
    if has_data_below:
        return below
    return folder


def _has_data(folder: Path, task: str) -> bool:
    """Returns whether a folder has a data file of the task."""
    return any(_files_of_split(folder, split) for split in facts(task).splits)


_NAMES = {
    "train": ("train", "training"),
    VALIDATION: (VALIDATION, "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
}
"""Split -> names of its file, in any case: the first one counts before all others."""


def _places(folder: Path) -> tuple[Path, Path]:
    """Returns where the files of a data folder may be; data sets of the hub have a folder data."""
    return folder, folder / "data"


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Returns what a folder has as a split; more than one is a mistake. See `rows.files_of`."""
    return _files_so_named(folder, split) or _files_by_another_name(folder, split)


def _files_by_another_name(folder: Path, split: str) -> list[Path]:
    """Returns files such as dev.csv or Train.csv, where nothing has the name of the split."""
    names = {
        f"{name}{suffix}" for name in _NAMES.get(split, (split,)) for suffix in SUFFIXES
    }
    files = []
    for place in _places(folder):
        if place.is_dir():
            files += [path for path in place.iterdir() if path.name.lower() in names]
    return sorted(path for path in files if path.is_file())


def _files_so_named(folder: Path, split: str) -> list[Path]:
    files = []
    for place in _places(folder):
        paths = [place / f"{split}{suffix}" for suffix in SUFFIXES]
        files += [path for path in paths if path.is_file()]
        # The shards of a split are one entry: their name with a star in place of the number.
        patterns = set()
        for path in place.glob(f"{split}-*-of-*"):
            pattern = _pattern(path)
            if pattern and suffix_of(path.name):
                patterns.add(pattern)
        files += sorted(patterns)
    # A Dataset has no name: it is training data.
    saved = [folder / split]
    if split == "train":
        saved.append(folder)
    for place in saved:
        if (place / _STATE).is_file():
            files.append(_saved_dataset(place))
    return files


_SPREADSHEETS = (".xlsx", ".xls", ".ods")
_STATE = "state.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+(?:\.gz)?)")
_HASHED_SHARD = re.compile(r".+-\d{5}-of-\d{5}-[0-9a-f]{16}(\.\w+)")


def _pattern(path: Path) -> Path | None:
    """Returns the name with a star for all shards that one of them is of; None: it is none."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return None
    head, _, count, suffix = match.groups()
    return path.with_name(f"{head}-*-of-{count}{suffix}")


def _saved_dataset(folder: Path) -> Path:
    """Returns the files of a Dataset that `save_to_disk` wrote.

    Raises:
        UsageError: the folder is not as the datasets library writes it today.
    """
    state = read_json(folder / _STATE) or {}
    try:
        names = [file["filename"] for file in state["_data_files"]]
        # The bare name: what came with the data must not lead out of its folder.
        first = folder / Path(names[0]).name
    except (KeyError, IndexError, TypeError):
        raise UsageError(
            f"{str(folder / _STATE)!r} names no files of data",
            "save the data set again: load_from_disk(...).save_to_disk(...)",
        ) from None
    if state.get("_indices_data_files"):
        raise UsageError(
            f"{str(folder)!r} was saved as a choice of rows, by an old version of datasets",
            "save the data set again: load_from_disk(...).save_to_disk(...)",
        )
    return _pattern(first) or first


def _check_shards(path: Path) -> None:
    """Raises UsageError where one of the files of a split is missing."""
    files = files_of(path)
    # Any number will do: how many shards there must be is behind it.
    match = _SHARD.fullmatch(path.name.replace("*", "00000"))
    if match is None or path in files:
        return
    head, _, count, suffix = match.groups()
    present = {file.name for file in files}
    expected = [
        f"{head}-{number:05}-of-{count}{suffix}" for number in range(int(count))
    ]
    missing = [name for name in expected if name not in present]
    if missing:
        raise UsageError(
            f"{str(path)!r}: {len(missing):,} of {int(count):,} files are missing: "
            f"{some(missing, 3)}",
            "copy the data set anew",
        )


_UNPACK = {
    ".zip": "python -m zipfile -e {file} {folder}",
    ".bz2": "bunzip2 {file}",
    ".xz": "unxz {file}",
    ".zst": "unzstd {file}",
    ".7z": "7z x -o{folder} {file}",
}
"""Ending of a packed file that is not read -> the command that unpacks it into its folder."""


class NoSplitError(UsageError):
    """The data has no such split."""

    def __init__(self, problem: str, split: str, hint: str) -> None:
        hint = hint.rstrip(".")
        # First: most folders without the file have no such rows.
        if split == VALIDATION:
            hint = (
                f"--validation-fraction 0.1 takes it from the training data; or {hint}"
            )
        super().__init__(problem, hint)


def find_split(folder: Path, split: str) -> Path:
    """Returns the file of one split of a local data set, or the name with a star of its files.

    Raises:
        UsageError: the folder is closed to this user, or has no such file, or several.
    """
    try:
        files = _files_of_split(folder, split)
    except PermissionError:
        raise UsageError(
            f"the data folder {str(folder)!r} is closed to {user_name(os.geteuid())}",
            "ask its owner to open it, or copy the data",
        ) from None
    if not files:
        _check_kinds(folder, split)
        raise NoSplitError(
            f"the data folder {str(folder)!r} has no {split} file: {_contents(folder)}",
            split,
            _cure_of_no_file(folder, split),
        )
    if len(files) > 1:  # which one is meant would be a guess
        file_names = some([str(file.relative_to(folder)) for file in files])
        raise UsageError(
            f"the data folder {str(folder)!r} has more than one {split} file: {file_names}",
            "leave one of them there",
        )
    _check_shards(files[0])
    return files[0]


def _cure_of_no_file(folder: Path, split: str) -> str:
    """Returns what to do where a folder has no file of a split: the cure of what is surest."""
    return (
        _cure_of_hashes(folder, split)
        or _cure_of_other_rows(folder, split)
        or _cure_of_spreadsheet(folder, split)
        or _cure_of_other_place(folder, split)
        or _cure_of_one_file(folder, split)
        or _cure_of_folder(folder, split)
        or f"name it {split}.csv, .tsv, .jsonl or .txt, each also as .gz, .parquet or .arrow; "
        "shards and others: slurmft help own-data"
    )


def _cure_of_other_rows(folder: Path, split: str) -> str:
    """Returns what to do with a file of the split's name whose rows have another form."""
    for name in sorted(os.listdir(folder)):
        if name.startswith(f"{split}.") and (cure := cure_of_words(folder / name)):
            return cure
    for name in (f"{split}.ndjson", f"{split}.json"):
        file = folder / name
        if file.is_file():
            lines = as_argument(file.with_suffix(".jsonl"))
            if_rows = f"if each line of it is a row: mv {as_argument(file)} {lines}"
            return cure_of_json(file) or if_rows
    return ""


def _cure_of_spreadsheet(folder: Path, split: str) -> str:
    if any(name.lower().endswith(_SPREADSHEETS) for name in os.listdir(folder)):
        return f"open the spreadsheet, and save it as CSV (UTF-8): {split}.csv"
    return ""


def _cure_of_other_place(folder: Path, split: str) -> str:
    """Returns what to do where the file is in an archive, or in a folder below."""
    for name in sorted(os.listdir(folder)):
        stem, ending = os.path.splitext(name)
        inner = folder / name
        with contextlib.suppress(OSError):
            if inner.is_dir() and _files_of_split(inner, split):
                return f"{name}/ has one: give {as_argument(inner)}"
        if ending.lower() in _UNPACK and stem.startswith(split):
            return _unpacking(inner)
    return ""


def _unpacking(path: Path) -> str:
    """Returns what to do with an archive of a kind that is not read."""
    command = _UNPACK[path.suffix.lower()]
    words = command.format(file=as_argument(path), folder=as_argument(path.parent))
    return f"unpack it: {words}"


def _cure_of_folder(folder: Path, split: str) -> str:
    """Returns what to do where a folder stands for the file of a split."""
    if not (folder / split).is_dir():
        return ""
    return (
        f"{split}/ is a folder: write its rows into one file, {split}.csv; shards and others: "
        "slurmft help own-data"
    )


def _cure_of_one_file(folder: Path, split: str) -> str:
    """Returns what to do where a file of another name may hold all rows."""
    single = _only_file(folder)
    if split != "train" or single is None:
        return ""
    train_file = as_argument(folder / f"train{suffix_of(single.name)}")
    return (
        f"if {single.name} is the one: mv {as_argument(single)} {train_file}; then give "
        "--validation-fraction 0.1, too, which takes the validation rows from it"
    )


def _only_file(folder: Path) -> Path | None:
    """Returns the file of rows in a folder, where there is one alone, which is no other split's."""
    files = [path for path in folder.iterdir() if suffix_of(path.name)]
    other_splits = {path for name in _NAMES for path in _files_of_split(folder, name)}
    if len(files) != 1 or files[0] in other_splits:
        return None
    return files[0]


def _cure_of_hashes(folder: Path, split: str) -> str:
    """Returns how the shards of a split lose the hashes that older versions of datasets have put
    behind their names; "": none has one."""
    for place in _places(folder):
        for path in place.glob(f"{split}-*-of-*"):
            if match := _HASHED_SHARD.fullmatch(path.name):
                files = f"{as_argument(place)}/*-of-*-*{match[1]}"
                return (
                    "take the hash out of the names: "
                    f'for file in {files}; do mv "$file" "${{file%-*}}{match[1]}"; done'
                )
    return ""


def _check_kinds(folder: Path, split: str) -> None:
    """Raises UsageError where what has the name of a split's file is none."""
    for place in _places(folder):
        for suffix in SUFFIXES:
            path = place / f"{split}{suffix}"
            other = other_kind(path)
            if other:
                raise UsageError(
                    f"{str(path)!r} is {other}, and no file of rows",
                    "write the rows into a file of that name",
                )


def _contents(folder: Path) -> str:
    """Returns what a data folder holds, for the message that something is missing."""
    names = []
    for path in sorted(folder.iterdir()):
        name = path.name
        # "it has train" would say the opposite of what is meant.
        if path.is_dir():
            name += "/"
        names.append(name)
    if not names:
        return "it is empty"
    return f"it has {some(names)}"


def may_have_test(train: TrainConfig) -> bool:
    """Returns whether the data may have a test split to evaluate.

    That is a folder that has its file, or a data set of the hub that is not one of GLUE's, whose
    tests have no labels.
    """
    task_facts = facts(train.task)
    if train.data is None or len(task_facts.splits) != 2:
        return False
    if is_local(train.data):
        return bool(_files_of_split(Path(train.data), "test"))
    return task_facts.labels is None or train.task == "text-regression"
