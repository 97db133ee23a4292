"""What a job runs, as far as the toolkit has to know it."""

from dataclasses import dataclass, field
from typing import Any

from slurmft.core.files import fits

_SHAPE = {
    "kind": str, "name": str, "module": str, "needs_hub": bool, "paths": [str], "code": str,
    "inputs": {...: {"bytes": int, "mtime_ns": int, "sha256": str, "what": str}},
    "settings": dict,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program that every rank of a job runs. Whoever submits it describes it; the toolkit reads
    nothing else of it."""

    kind: str
    """Which program it is: "train", the built-in one."""
    name: str
    """What it does, in a word: begins the name of the run directory."""
    module: str
    """Every rank runs `python -m MODULE RUN_DIR`."""
    needs_hub: bool = False
    """Whether it loads something from the Hugging Face hub, or from its cache."""
    paths: tuple[str, ...] = ()
    """Files and folders that it reads, besides the run directory: a container must show them."""
    code: str = ""
    """Folder that modules of the user's own are imported from: frozen at submission."""
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Those of its paths that must not change before it starts: path -> its fingerprint at
    submission (`slurmft.core.fingerprint`), and in words what it has."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its own options, as JSON has them; for itself, for reports and for people."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Program":
        """From what `dataclasses.asdict` and JSON made of one; TypeError for all else."""
        if not fits(values, _SHAPE):
            raise TypeError("its program is none")
        return cls(**values | {"paths": tuple(values["paths"])})
