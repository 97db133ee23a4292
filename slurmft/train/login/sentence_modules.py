"""Modules and prompts of a model of sentence-transformers: how states of tokens become a vector.

The login node and the ranks read them by this code. It needs neither torch nor transformers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmft.core.errors import UsageError
from slurmft.core.files import parse_json, read_text
from slurmft.core.hub import is_local
from slurmft.train.config import TrainConfig
from slurmft.train.login.model_files import tokenizer_file
from slurmft.train.own_task import facts

FileOf = Callable[[str], Path | None]
"""Returns a file of a model by its name; None where the model has no such file."""
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Switch of a pooling in older files -> its name, in the order in which vectors are joined."""
LIBRARY = "sentence-transformers"
"""The library of tasks whose models have modules, see `TaskFacts.library`."""
MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
_WEIGHTS = "model.safetensors"
_BY_THEMSELVES = "train it by sentence-transformers itself: slurmft run -- train.py"


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer, and an activation behind it."""

    weights: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: str
    """Name of its class, as torch has it: torch.nn.modules.activation.Tanh."""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The modules that make a vector of the states of a text's tokens. The defaults are those of a
    model that names none: their mean."""

    poolings: tuple[str, ...] = ("mean",)
    """Their vectors are joined to one."""
    dense: tuple[Dense, ...] = ()
    """Layers behind the pooling."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    """Name of the prompt that stands before every text."""
    truncate_dim: int | None = None
    """How many numbers of a vector `encode()` returns, the first ones; None: all."""

    @property
    def prompt(self) -> str:
        """Text before every text; "": none."""
        if self.default_prompt is None:
            return ""
        return self.prompts[self.default_prompt]


class AbsentFileError(UsageError):
    """A model lacks a file that its list of modules names."""


def on_this_machine(model: str) -> SentenceModules | None:
    """Returns the modules of a model in its folder or the hub's cache; None where the cache does
    not have all of it.

    Raises:
        UsageError: see `read`.
    """
    file_of = _files_here(model)
    if file_of is None:
        return None
    try:
        return read(model, file_of)
    # The hub's cache holds what has been asked for so far: the job, or `slurmft fetch`, asks for
    # the rest.
    except AbsentFileError:
        if is_local(model):
            raise
        return None


def check(train: TrainConfig) -> Iterator[str]:
    """Yields a remark where a model of sentence-transformers has prompts of which training puts
    none before texts.

    Raises:
        UsageError: its vectors or scores are made in a way that training does not have, see `read`
            and `check_reranker`.
    """
    model = str(train.model)
    if facts(train.task).predictions != "vectors":
        file_of = _files_here(model)
        if file_of is not None:
            check_reranker(model, file_of)
        return
    modules = on_this_machine(model)
    if modules is None:
        return
    check_options(modules, train)
    prompts = [name for name, text in modules.prompts.items() if text]
    if prompts and not modules.prompt:
        yield (
            f"--model {train.model!r} has the prompts {', '.join(map(repr, prompts))}, none of "
            "them by default: as encode(), training puts none before texts; those of --data may "
            "begin with them"
        )


def check_options(modules: SentenceModules, train: TrainConfig) -> None:
    """Raises UsageError where an option cannot be used with the modules of a model."""
    if modules.dense and train.shard != "none":
        raise UsageError(
            f"--shard {train.shard} does not divide the Dense modules of --model {train.model!r}",
            "leave --shard out",
        )


def prompt(train: TrainConfig) -> str:
    """Returns what stands before every text of a task whose model makes vectors; "": nothing, or
    the model is not on this machine."""
    if train.model is None or facts(train.task).predictions != "vectors":
        return ""
    modules = on_this_machine(train.model)
    if modules is None:
        return ""
    return modules.prompt


def _files_here(model: str) -> FileOf | None:
    """Returns what finds the files of a model in its folder or the hub's cache; None: it is not on
    this machine."""
    folder = Path(model)
    if not is_local(model):
        tokenizer = tokenizer_file(model)
        if tokenizer is None:
            return None
        folder = tokenizer.parent

    def file_of(name: str) -> Path | None:
        path = folder / name
        if path.is_file():
            return path
        return None

    return file_of


def check_reranker(model: str, file_of: FileOf) -> None:
    """Raises UsageError where a model is a CrossEncoder whose scores are made in a way that
    training does not have: by other modules than the Transformer, behind a prompt, or from texts
    that a chat template writes."""
    settings = _settings(file_of)
    if settings.get("model_type") != "CrossEncoder":
        return
    _check_texts(model, file_of)
    kinds = ["Transformer"]
    modules_file = file_of(MODULES)
    if modules_file is not None:
        kinds = [_kind(module) for module in _modules(model, modules_file)]
    if kinds != ["Transformer"]:
        raise UsageError(
            f"--model {model!r} has the modules {', '.join(kinds)} of sentence-transformers: "
            "training knows Transformer alone",
            _BY_THEMSELVES,
        )
    prompts, default_prompt = _prompts(model, file_of)
    if default_prompt and prompts[default_prompt]:
        raise UsageError(
            f"--model {model!r} has the default prompt {default_prompt!r}, which training puts "
            "before no text",
            _BY_THEMSELVES,
        )


def read(model: str, file_of: FileOf) -> SentenceModules:
    """Returns the modules that a model names; of one that names none, the mean.

    Raises:
        UsageError: its vectors are made in a way that training does not have, or a file is damaged.
    """
    prompts, default_prompt = _prompts(model, file_of)
    modules_file = file_of(MODULES)
    base = SentenceModules(
        prompts=prompts,
        default_prompt=default_prompt,
        truncate_dim=_settings(file_of).get("truncate_dim"),
    )
    if modules_file is None:
        return base
    modules = _modules(model, modules_file)
    folders = [module["path"] for module in modules]
    kinds = [_kind(module) for module in modules]
    _check_kinds(model, kinds)
    _check_texts(model, file_of)
    pooling = _module_config(model, folders[1], file_of)
    poolings = _poolings(model, pooling)
    # Without a default prompt no text has one that could be left out.
    if (
        default_prompt
        and prompts[default_prompt]
        and not pooling.get("include_prompt", True)
    ):
        raise UsageError(
            f"--model {model!r} leaves its prompt out of the pooling, which training does not do",
            _BY_THEMSELVES,
        )
    dense = []
    for kind, folder in zip(kinds, folders, strict=True):
        if kind == "Dense":
            dense.append(_dense(model, folder, file_of))
    return replace(base, poolings=poolings, dense=tuple(dense))


def _json(path: Path) -> Any:
    try:
        return parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{str(path)!r} cannot be read: {error}",
            "save the model again, or copy it anew",
        ) from None


def _modules(model: str, file: Path) -> list[dict[str, Any]]:
    """Returns the modules that a file lists, in their order: their path, and the type of each."""
    try:
        modules = sorted(_json(file), key=lambda module: int(module["idx"]))
        return [{key: str(each[key]) for key in ("path", "type")} for each in modules]
    except (TypeError, KeyError, ValueError):
        raise UsageError(
            f"--model {model!r}: its {MODULES} is no list of modules as sentence-transformers "
            "writes it",
            "save the model again, by its save_pretrained()",
        ) from None


def _kind(module: Mapping[str, Any]) -> str:
    """Returns the name of the class of a module; "CLASS of another package" for those that are no
    part of sentence-transformers."""
    package, _, name = module["type"].rpartition(".")
    # By the package alone: its versions have these classes in different modules.
    if package.partition(".")[0] != "sentence_transformers":
        return f"{name} of {package}"
    return str(name)


def _check_kinds(model: str, kinds: list[str]) -> None:
    """Raises UsageError where modules are others than Transformer, Pooling, any number of Dense,
    and maybe Normalize."""
    last = kinds[2:]
    # Vectors are brought to length 1 in any case.
    if last[-1:] == ["Normalize"]:
        last.pop()
    if kinds[:2] != ["Transformer", "Pooling"] or set(last) - {"Dense"}:
        raise UsageError(
            f"--model {model!r} has the modules {', '.join(kinds)} of sentence-transformers: "
            "training knows Transformer, Pooling, Dense and Normalize, in this order",
            _BY_THEMSELVES,
        )


def _check_texts(model: str, file_of: FileOf) -> None:
    """Raises UsageError where texts are to be written otherwise before the tokenizer: in lower
    case, or by a chat template."""
    # The file of the module Transformer, which lies beside the model's own.
    file = file_of("sentence_bert_config.json")
    if file is None:
        return
    settings = _json(file)
    if settings.get("do_lower_case"):
        raise UsageError(
            f"--model {model!r} has do_lower_case in its {file.name}, which training does not do",
            "write the texts in lower case, and give a copy of the model without it",
        )
    # Versions from 6 on write every text as a message, where they can.
    if "message" in (settings.get("modality_config") or {}):
        raise UsageError(
            f"--model {model!r} writes texts by its chat template ('message' in its {file.name}), "
            "which training does not do",
            _BY_THEMSELVES,
        )


def _prompts(model: str, file_of: FileOf) -> tuple[dict[str, str], str | None]:
    """Returns the prompts of a model, and the name of the one that stands before every text."""
    settings = _settings(file_of)
    prompts = {
        name: text or "" for name, text in (settings.get("prompts") or {}).items()
    }
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise UsageError(
            f"--model {model!r}: its default prompt {default!r} is none of its prompts: "
            f"{', '.join(prompts) or 'it has none'}",
            f"correct its {SETTINGS}",
        )
    return prompts, default


def _settings(file_of: FileOf) -> dict[str, Any]:
    """Returns the settings of a model of sentence-transformers; none where it is another one."""
    file = file_of(SETTINGS)
    if file is None:
        return {}
    settings: dict[str, Any] = _json(file)
    return settings


def _module_config(model: str, folder: str, file_of: FileOf) -> dict[str, Any]:
    name = f"{folder}/config.json"
    config: dict[str, Any] = _json(_needed(model, name, file_of))
    return config


def _needed(model: str, name: str, file_of: FileOf) -> Path:
    path = file_of(name)
    if path is None:
        raise AbsentFileError(
            f"--model {model!r} lacks the file {name!r}, which its {MODULES} names",
            "copy the model anew, or save it again",
        )
    return path


def _poolings(model: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("pooling_mode")
    if names is None:
        # Older versions have a switch for each.
        names = [name for key, name in POOLINGS.items() if config.get(key)] or ["mean"]
    # A single pooling is a text, several are a list.
    if isinstance(names, str):
        names = [names]
    for name in names:
        if name not in POOLINGS.values():
            raise UsageError(
                f"--model {model!r} has the pooling {name!r}, which training does not know",
                _BY_THEMSELVES,
            )
    return tuple(names)


def _dense(model: str, folder: str, file_of: FileOf) -> Dense:
    config = _module_config(model, folder, file_of)
    # Where the file names none, it is sentence-transformers' own default.
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    # Others read or write states of tokens, or add their input to their output.
    is_plain = (
        config.get("module_input_name", "sentence_embedding") == "sentence_embedding"
        and config.get("module_output_name") in (None, "sentence_embedding")
        and not config.get("use_residual")
        # A class of another package would be code that comes with the model.
        and activation.startswith("torch.nn.")
    )
    if not is_plain:
        raise UsageError(
            f"--model {model!r}: its module {folder!r} is no linear layer with an activation of "
            "torch behind the pooling",
            _BY_THEMSELVES,
        )
    weights = f"{folder}/{_WEIGHTS}"
    if file_of(weights) is None and file_of(f"{folder}/pytorch_model.bin") is not None:
        raise UsageError(
            f"--model {model!r} has the weights of its module {folder!r} in a pickle (.bin), which "
            "can run any code, and is not loaded",
            "if you trust it: SentenceTransformer(...).save_pretrained('safe') writes safetensors, "
            "and give --model safe",
        )
    return Dense(
        _needed(model, weights, file_of),
        int(config["in_features"]),
        int(config["out_features"]),
        bool(config.get("bias", True)),
        activation,
    )
