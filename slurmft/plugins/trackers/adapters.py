"""Adapters of Accelerate's trackers: one for each, with the arguments that it is started with.

Accelerate creates and feeds the trackers. It does not continue a tracker's run after a requeue,
keep its data in a folder of ours, or switch off what a tracker gathers by itself. An `Adapter` says
how that is done for one tracker.
"""

import importlib
import operator
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """The run that a tracker is started for."""

    title: str
    """The name of the run directory."""
    project: str
    folder: Path
    """Where all trackers of the run keep their data."""
    run_id: str | None = None
    """The tracker's id of this run, if it resumes."""
    after_step: int = 0
    """Steps that are done. What a crash did after them is done again."""


Arguments = Callable[[Target], dict[str, Any]]


def _no_arguments(target: Target) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """How one tracker is started and continued, and how its data is seen."""

    project: Callable[[Target], str] = lambda target: target.project
    """The first argument of Accelerate's class."""
    arguments: Arguments
    """Its further arguments."""
    resumed: Arguments = _no_arguments
    """More of them, for a run that resumes."""
    id_attribute: str = ""
    """Where the started tracker has its id of the run; empty: it needs none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set unless the user has set them. {folder} is the folder of the trackers,
    {uri} the same as a URI.

    Compute nodes have no internet, so data stays in the run directory. Of the code, no tracker gets
    more than the run's settings where that can be switched off: a git remote may hold a token.
    """
    command: str = ""
    """What shows or uploads the data. {folder} and {uri} are as above, {data} is what `data` finds;
    where that is nothing, there is no command."""
    data: str = ""
    """Pattern of the tracker's data below the folder."""


def _wandb_id(target: Target) -> str:
    # The same in all attempts, which sync later uploads as one run. wandb refuses some characters.
    return re.sub(r"[^A-Za-z0-9_-]", "-", target.title)


def _comet_arguments(target: Target) -> dict[str, Any]:
    # Not at the top: it is installed only where it is used.
    comet = importlib.import_module("comet_ml")
    return {
        "experiment_key": target.run_id,
        "mode": "get_or_create",
        "experiment_config": comet.ExperimentConfig(name=target.title),
    }


def _swanlab_resumed(target: Target) -> dict[str, Any]:
    """Offline, SwanLab knows no earlier runs."""
    if os.environ["SWANLAB_MODE"] != "online":
        return {}
    return {"id": target.run_id, "resume": "allow"}


ADAPTERS = {
    "tensorboard": Adapter(
        # TensorBoard has no projects: Accelerate takes its argument as the folder's name.
        project=lambda target: target.title,
        arguments=lambda target: {"logging_dir": str(target.folder / "tensorboard")},
        # TensorBoard then hides what a crashed attempt has logged after its last checkpoint.
        resumed=lambda target: {"purge_step": target.after_step + 1},
        command="tensorboard --logdir {folder}",
    ),
    "wandb": Adapter(
        project=lambda target: os.environ.get("WANDB_PROJECT", target.project),
        arguments=lambda target: {
            "name": target.title,
            "dir": str(target.folder),
            "id": _wandb_id(target),
            "resume": "allow",
        },
        environment={
            "WANDB_MODE": "offline",
            "WANDB_DISABLE_GIT": "true",
            "WANDB_DISABLE_CODE": "true",
            # It would keep the output as well, which is in the rank's log.
            "WANDB_CONSOLE": "off",
        },
        # Later attempts continue the run of the first.
        command="wandb sync --append {data}",
        data="wandb/offline-run-*",
    ),
    "mlflow": Adapter(
        arguments=lambda target: {"run_name": target.title},
        resumed=lambda target: {"run_id": target.run_id},
        id_attribute="active_run.info.run_id",
        environment={
            # Its other store is SQLite, which shared file systems do not lock well.
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "MLFLOW_TRACKING_URI": "{uri}/mlruns",
        },
        command="MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {uri}/mlruns",
        data="mlruns",
    ),
    "trackio": Adapter(
        # embed: only for notebooks.
        arguments=lambda target: {
            "name": target.title,
            "resume": "allow",
            "embed": False,
        },
        environment={"TRACKIO_DIR": "{folder}/trackio"},
        command="TRACKIO_DIR={folder}/trackio trackio show --project {project}",
    ),
    "aim": Adapter(
        project=lambda target: target.title,
        arguments=lambda target: {
            "logging_dir": str(target.folder),
            "experiment": target.project,
            # Neither the load of the hardware nor the output, which is in the rank's log.
            "system_tracking_interval": None,
            "capture_terminal_logs": False,
        },
        resumed=lambda target: {"run_hash": target.run_id},
        id_attribute="writer.hash",
        command="aim up --repo {folder}",
    ),
    "comet_ml": Adapter(
        arguments=_comet_arguments,
        id_attribute="writer.get_key",
        environment={
            "COMET_START_ONLINE": "0",
            "COMET_OFFLINE_DIRECTORY": "{folder}/comet_ml",
            "COMET_AUTO_LOG_CODE": "false",
            "COMET_AUTO_LOG_GIT_METADATA": "false",
            "COMET_AUTO_LOG_GIT_PATCH": "false",
            "COMET_AUTO_LOG_ENV_DETAILS": "false",
            "COMET_AUTO_LOG_CLI_ARGUMENTS": "false",
            "COMET_AUTO_LOG_OUTPUT_LOGGER": "false",
        },
        command="comet upload {data}",
        data="comet_ml/*.zip",
    ),
    "clearml": Adapter(
        arguments=lambda target: {
            "task_name": target.title,
            # Else a run of the same name within 72 hours is overwritten.
            "reuse_last_task_id": False,
            "auto_connect_streams": False,
            "auto_connect_arg_parser": False,
            "auto_connect_frameworks": False,
            "auto_resource_monitoring": False,
        },
        resumed=lambda target: {"continue_last_task": target.run_id},
        id_attribute="task.id",
        environment={
            "CLEARML_OFFLINE_MODE": "1",
            "CLEARML_CACHE_DIR": "{folder}/clearml",
            "CLEARML_VCS_REPO_URL": "none",
        },
    ),
    "dvclive": Adapter(
        project=lambda target: target.title,
        arguments=lambda target: {
            "dir": str(target.folder / "dvclive"),
            # Both would write into the user's repository.
            "save_dvc_exp": False,
            "dvcyaml": None,
        },
        resumed=lambda target: {"resume": True},
    ),
    "swanlab": Adapter(
        arguments=lambda target: {
            "name": target.title,
            "log_dir": str(target.folder / "swanlab"),
            "mode": os.environ["SWANLAB_MODE"],
        },
        resumed=_swanlab_resumed,
        id_attribute="run.id",
        environment={"SWANLAB_MODE": "offline", "SWANLAB_PROBE_GIT": "false"},
        command="swanlab sync {data}",
        data="swanlab/run-*",
    ),
}
"""Accelerate's name of a tracker -> its adapter."""


def create(name: str, target: Target) -> Any:
    """Creates and starts a tracker, by Accelerate's class for it."""
    adapter = ADAPTERS[name]
    places = {"folder": str(target.folder), "uri": target.folder.as_uri()}
    for variable, value in adapter.environment.items():
        os.environ.setdefault(variable, value.format(**places))
    # After the variables: SwanLab's arguments depend on one.
    arguments = adapter.arguments(target)
    if target.run_id is not None:
        arguments |= adapter.resumed(target)
    # Not at the top: accelerate imports torch, and login-node commands read this module.
    classes = importlib.import_module("accelerate.tracking").LOGGER_TYPE_TO_CLASS
    tracker = classes[name](adapter.project(target), **arguments)
    tracker.start()
    return tracker


def run_id_of(name: str, tracker: Any) -> str:
    """Returns the id by which a started tracker knows the run; "-" where it needs none."""
    attribute = ADAPTERS[name].id_attribute
    if not attribute:
        return "-"
    value = operator.attrgetter(attribute)(tracker)
    if callable(value):  # comet_ml's get_key
        value = value()
    return str(value)


def shell_command(name: str, target: Target) -> str | None:
    """Returns the command that shows or uploads what a tracker has; None: there is none."""
    adapter = ADAPTERS[name]
    data: list[Path] = []
    if adapter.data:
        data = sorted(target.folder.glob(adapter.data))
    lacks_data = adapter.data and not data
    if not adapter.command or lacks_data:
        return None
    return adapter.command.format(
        folder=shlex.quote(str(target.folder)),
        uri=shlex.quote(target.folder.as_uri()),
        data=shlex.join(map(str, data)),
        project=shlex.quote(target.project),
    )
