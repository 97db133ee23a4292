"""Trackers: those that Accelerate knows, by its own classes for them.

They get copies of what `records.jsonl` has. A tracker works in a thread of its own: one that
raises, or hangs, costs a warning, never the run or a step of it.
"""

import contextlib
import importlib
import importlib.util
import math
import operator
import os
import queue
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError
from slurmft.core.files import read_json, write_json
from slurmft.runs.rundir import RunDir

_START_S = 60
"""How long a tracker may take to start before the run continues without it."""
_WAITING = 1000
"""Logs that may wait for a tracker; more are dropped."""
CLOSE_S = 20
"""How long the rank waits for its trackers to finish."""

_TRAIN = ("loss", "learning_rate", "samples_per_s", "epoch")


def check(job: JobConfig) -> None:
    """Raises UsageError where a tracker's package is not installed; in a container it may be."""
    for name in job.trackers if job.container is None else ():
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"--log-with {name}: the Python package {name} is not installed in {sys.prefix}",
                f"{shlex.quote(sys.executable)} -m pip install {name}",
            )


def next_commands(run: RunDir) -> list[str]:
    """What to type to see what the trackers of a run have."""
    job, folder, lines = run.load_config().job, run.tracking, []
    if "tensorboard" in job.trackers:
        lines.append(f"tensorboard --logdir {shlex.quote(str(folder))}")
    for pattern, command in _UPLOADS.items():
        if offline := sorted(folder.glob(pattern)):
            lines.append(shlex.join([*command, *map(str, offline)]))
    if "trackio" in job.trackers:
        place = f"TRACKIO_DIR={shlex.quote(str(folder / 'trackio'))}"
        lines.append(f"{place} trackio show --project {shlex.quote(job.project)}")
    if "aim" in job.trackers:
        lines.append(shlex.join(["aim", "up", "--repo", str(folder)]))
    if (folder / "mlruns").is_dir():
        uri = shlex.quote((folder / "mlruns").as_uri())
        lines.append(f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {uri}")
    return lines


_UPLOADS = {
    "wandb/offline-run-*": ("wandb", "sync", "--append"),  # later attempts continue the first's run
    "comet_ml/*.zip": ("comet", "upload"),
    "swanlab/run-*": ("swanlab", "sync"),
}


class Tracking:
    """All trackers of a run; on its main rank."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._names = run, run.load_config().job.trackers
        self._trackers: list[_Tracker] = []
        self._facts: dict[str, Any] = {}
        self._step = 0

    def take(self, record: dict[str, Any]) -> None:
        """Hands a record of the run on. The trackers start with the first that they can use: by
        then it is known where the run resumes."""
        if record["event"] == "start":
            self._facts = {k: v for k, v in record.items() if k not in ("event", "time")}
        elif record["event"] == "resume":
            self._step = record["step"]
        elif record["event"] == "step" and "samples_per_s" in record:
            values = {f"train/{k}": record[k] for k in _TRAIN if k in record}
            self._log(values, record["step"])
        elif record["event"] == "epoch":
            self._log({f"eval/{k}": v for k, v in record["metrics"].items()}, self._step)

    def _log(self, values: dict[str, float], step: int) -> None:
        if not self._trackers:
            begin = (self._run, self._facts, self._step)
            self._trackers = [_Tracker(name, *begin) for name in self._names]
        self._step = step
        for tracker in self._trackers:
            tracker.put((values, step))

    def messages(self) -> Iterator[str]:
        """Warnings since the last call."""
        for tracker in self._trackers:
            while tracker.messages:
                yield tracker.messages.pop(0)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Lets the trackers write the rest, for so long; no process of theirs stays."""
        deadline = time.monotonic() + timeout_s
        for tracker in self._trackers:
            tracker.put(None)
        for tracker in self._trackers:
            tracker.join(max(0.0, deadline - time.monotonic()))
            if tracker.is_alive():
                tracker.give_up("does not finish")


class _Tracker(threading.Thread):
    def __init__(self, name: str, run: RunDir, facts: dict[str, Any], after_step: int) -> None:
        super().__init__(name=name, daemon=True)
        self.messages: list[str] = []
        self._run, self._facts, self._after_step = run, facts, after_step
        self._queue: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(_WAITING)
        self._start_by, self._gone = time.monotonic() + _START_S, False
        self.start()

    def put(self, values: tuple[dict[str, float], int] | None) -> None:
        """Values and their step, for its log; None: it is to finish."""
        if time.monotonic() > self._start_by:
            self.give_up(f"does not start within {_START_S} s")
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(values)

    def give_up(self, why: str) -> None:
        if not self._gone:
            self.messages.append(f"--log-with {self.name}: it {why}; the run continues without it")
        self._gone = True

    def run(self) -> None:
        try:
            tracker = self._made()
            self._start_by = math.inf
            while (item := self._queue.get()) is not None:
                tracker.log(item[0], step=item[1])
            tracker.finish()
            if self.name == "wandb":
                sys.modules["wandb"].teardown()  # its service process
        except BaseException as error:  # trackers end programs, too: wandb by SystemExit
            words = str(error).strip().partition("\n")[0]
            self.give_up(f"failed ({type(error).__name__}: {words})")

    def _made(self) -> Any:
        """The tracker, started; of a run that resumes, with the data that it has."""
        config = self._run.load_config()
        self._run.tracking.mkdir(exist_ok=True)
        path = self._run.tracking / f"{self.name}.json"
        old = (read_json(path, {"id": str}) or {}).get("id")
        kind = importlib.import_module("accelerate.tracking").LOGGER_TYPE_TO_CLASS[self.name]
        project, more = _settings(self.name, config.job, self._run, old, self._after_step)
        tracker = kind(project, **more)
        tracker.start()
        if old is None:
            known, plain = config.program.settings | self._facts, (int, float, str)
            given = {k: v for k, v in known.items() if v is not None}  # `plain`: all trackers take
            tracker.store_init_configuration(
                {k: v if isinstance(v, plain) else str(v) for k, v in given.items()}
            )
        own = operator.attrgetter(_IDS[self.name])(tracker) if self.name in _IDS else "here"
        write_json(path, {"id": str(own() if callable(own) else own)})
        return tracker


def _settings(
    name: str, job: JobConfig, run: RunDir, old: str | None, after_step: int
) -> tuple[str, dict[str, Any]]:
    """Project and further arguments of a tracker.

    Args:
        old: the tracker's id of the run, if it resumes.
        after_step: the steps that are done: what a crash did after them is done again.
    """
    title, top, folder = run.path.name, str(run.tracking), str(run.tracking / name)
    for variable, value in _OFFLINE.get(name, {}).items():
        os.environ.setdefault(variable, value.format(folder=folder))
    project, own, again = job.project, _OWN.get(name, {}), {"id": old, "resume": "allow"}
    match name:
        case "tensorboard":
            return title, {"logging_dir": folder} | ({"purge_step": after_step + 1} if old else {})
        case "wandb":
            again["id"] = old or re.sub(r"[^A-Za-z0-9_-]", "-", title)
            project = os.environ.get("WANDB_PROJECT", project)
            return project, {"name": title, "dir": top} | again | own
        case "mlflow":
            if not os.environ.get("MLFLOW_TRACKING_URI"):
                # Its other store is SQLite, which shared file systems do not lock well.
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
                store = (run.tracking / "mlruns").as_uri()
                importlib.import_module(name).set_tracking_uri(store)
            return project, {"run_id": old, "run_name": title}
        case "trackio":
            return project, {"name": title, "resume": "allow"} | own
        case "aim":
            return title, {"logging_dir": top, "experiment": project, "run_hash": old} | own
        case "comet_ml":
            config = importlib.import_module(name).ExperimentConfig(name=title, **own)
            again = {"experiment_key": old, "mode": "get_or_create"}
            return project, again | {"experiment_config": config}
        case "clearml":
            return project, {"task_name": title, "continue_last_task": old or False} | own
        case "dvclive":
            return title, {"dir": folder, "resume": old is not None} | own
        case _:  # swanlab; offline it knows no runs of before
            mode = os.environ["SWANLAB_MODE"]
            known = again if mode == "online" else {}
            return project, {"name": title, "log_dir": folder, "mode": mode} | known


_OWN: dict[str, dict[str, Any]] = {
    "wandb": {"settings": {"disable_git": True, "save_code": False, "console": "off"}},
    "trackio": {"embed": False},
    "aim": {"system_tracking_interval": None, "capture_terminal_logs": False},
    "comet_ml": dict.fromkeys((
        "log_code", "log_git_metadata", "log_git_patch", "log_env_details", "parse_args",
        "auto_output_logging",
    ), False),
    "clearml": dict.fromkeys((
        "auto_connect_streams", "auto_connect_arg_parser", "auto_connect_frameworks",
        "auto_resource_monitoring", "reuse_last_task_id",
    ), False),
    "dvclive": {"save_dvc_exp": False, "dvcyaml": None},
}  # fmt: skip
"""What they would gather or do by themselves."""
_OFFLINE = {
    "wandb": {"WANDB_MODE": "offline"},
    "trackio": {"TRACKIO_DIR": "{folder}"},
    "comet_ml": {"COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": "{folder}"},
    "clearml": {
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": "{folder}",
        "CLEARML_VCS_REPO_URL": "none",
    },
    "swanlab": {"SWANLAB_MODE": "offline", "SWANLAB_PROBE_GIT": "false"},
}
"""Compute nodes have no internet: variables that keep a tracker's data in the run directory, unless
the user has set them. Of the code, no tracker gets more than the run's settings, where that can be
switched off: a git remote may hold a token."""


_IDS = {
    "wandb": "run.id", "mlflow": "active_run.info.run_id", "aim": "writer.hash",
    "comet_ml": "writer.get_key", "clearml": "task.id", "swanlab": "run.id",
}  # fmt: skip
