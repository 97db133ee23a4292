"""What the files of a run hold, for those who read them: a file that somebody damaged, or that
another version wrote, counts as absent."""

from typing import Any

from slurmft.core.files import Shape, fits

_TEXT, NUMBER, _COUNT = (str, None), (float, None), (int, None)
SOME = range(1, 2**31)
METRICS = {...: NUMBER}

CONFIG: Shape = {
    "program": {
        "name?": str,
        "settings?": {"task?": _TEXT, "model?": _TEXT, "data?": _TEXT, "epochs?": _COUNT},
        "inputs?": {...: {"sha256": str}},
    },
    "job": {"nodes?": SOME, "cluster?": str, "requeue?": bool},
    "submission": {
        "time?": str, "host?": str, "user?": _TEXT, "command?": str, "slurmft?": str,
        "git?": ({"commit": _TEXT, "dirty?": bool}, None), "study?": (dict, None),
    },
}  # fmt: skip

RESULT: Shape = dict.fromkeys(
    ("metrics", "phases_s", "world_size", "nodes", "steps", "wall_s"), object
)
"""Reports say which values of a result are none that they can use."""

_RECORDS: dict[str, Shape] = {
    "start": {"total_steps": SOME},
    "step": {
        "step": int, "epoch?": float, "loss?": NUMBER, "samples_per_s?": NUMBER,
        "left_s?": NUMBER, "total_steps?": int, "learning_rate?": NUMBER,
    },
    "evaluate": {"done": int, "total": int},
    "epoch": {"metrics": METRICS, "epoch?": float, "step?": int, "loss?": NUMBER},
    "resume": {"step": int, "checkpoint": str, "changes?": [str]},
    "stopping": {"step": int, "reason": str},
    "early_stop": {"step": int, "evaluations": int, "metric": str},
    "warning": {"text": str},
    "preflight": {"text": str},
    "ranks": {"own_ms": [float], "memory_mib": [float]},
}  # fmt: skip


def is_record(value: Any) -> bool:
    """Whether a line of records.jsonl is a record that its readers understand; one of an event that
    they do not know is."""
    if not fits(value, {"event": str, "time?": float}):
        return False
    return fits(value, _RECORDS.get(value["event"], dict))
