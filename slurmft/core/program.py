"""The program of a job, as far as the toolkit has to know it."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmft.core import interpreter, plugins
from slurmft.core.decode import DecodeError, decode


@dataclass(frozen=True, slots=True)
class _Input:
    """Record of a file that must not change."""

    bytes: int
    mtime_ns: int
    sha256: str
    what: str


OWN = "own"
"""The kind of the programs of `slurmft run`."""

PREDICT = "predict"
"""The kind of the programs of `slurmft predict`."""


def trained_by(settings: Mapping[str, Any]) -> str:
    """Returns the directory of the run whose model predicts, by the settings of a prediction."""
    # The run has saved an adapter, or a whole model; the model below an adapter is elsewhere.
    model = settings.get("adapter") or settings.get("model")
    return os.path.dirname(str(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program that every rank of a job runs. Whoever submits it describes it; the toolkit reads
    nothing else of it."""

    kind: str
    """Which program it is: "train", the built-in one; a name in the group `slurmft.programs`."""
    name: str
    """Word for what it does: the name of the run directory begins with it."""
    module: str
    """Every rank runs `python -m MODULE RUN_DIR`."""
    needs_hub: bool = False
    """True if it loads something from the Hugging Face hub, or from its cache."""
    paths: tuple[str, ...] = ()
    """Files and folders that it reads, besides the run directory: a container must show them."""
    code: str = ""
    """Folder that modules of the user's own are imported from: frozen at submission."""
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Paths of it that must not change before it starts: path -> its fingerprint at
    submission (`slurmft.core.fingerprint`), and in words what it has."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its own options, as JSON has them; for itself, for reports and for people."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Program":
        """From what `dataclasses.asdict` and JSON made of one; TypeError for all else."""
        try:
            program = decode(values, cls)
            # Checked here, where a damaged file has one message: `fingerprint` trusts the keys.
            decode(program.inputs, dict[str, _Input])
        except DecodeError as error:
            raise TypeError(f"its program is none: {error}") from None
        return program


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """What the ranks of a program sum in each step."""

    # 25 MiB, the default of DDP's bucket_cap_mb.
    numbers: int = 25 * 2**18
    """How many numbers it has. By default, in fp32, the largest message of torch's DDP."""
    dtype: str = "float32"
    """Their type, as torch names it."""


class ProgramKind:
    """Answers of a kind of program to the kernel.

    The answers here are those of a program whose ranks torchrun starts, and that attaches to its
    job. Another kind subclasses this, as an entry point of the group `slurmft.programs`.
    """

    attaches = True
    """Its processes send heartbeats and record what they do. False: what they print is all that is
    known of them."""
    sums_gradients = False
    """Its ranks sum gradients in each step."""
    per = "torchrun"
    """What a node starts: a torchrun, or the program once a "node", a "process" or a "gpu"."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @property
    def python(self) -> str:
        """The Python whose packages it uses."""
        return interpreter.PYTHON

    def gradient(self) -> Gradient:
        """Returns the gradient that its ranks sum, on CPUs as this node's."""
        return Gradient()

    def check_python(self) -> None:
        """Raises NotOwnError where others may have replaced the Python that slurmft has chosen for
        the program. Asked before each start."""

    def newest_checkpoint(self) -> str | None:
        """Returns its newest checkpoint outside of the run directory, in words; None: none."""
        return None

    def checkpoint_place(self) -> str:
        """Returns where it writes checkpoints, for messages; "": into the run directory."""
        return ""

    def read_result(self) -> dict[str, Any] | None:
        """Returns what it has measured, at its end; None: it records its result by itself.

        Raises:
            LookupError: it was to write its result, and has not.
        """
        return None

    def node_variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Returns further variables of its processes on this node."""
        return {}

    # Static: studies ask this about the settings in a config.json of any version, of which no
    # `Program` need be made.
    @staticmethod
    def varied(settings: dict[str, Any], cell: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the settings in which runs of it differ; `cell` is that of its study."""
        return settings


def kind_of(program: Program) -> ProgramKind:
    """Returns what the kernel may ask of a program."""
    return kind_class(program.kind)(program)


RANK_MODULES = {
    "train": "slurmft.train.rank",
    PREDICT: "slurmft.train.rank",
    OWN: "slurmft.programs.process",
}
"""What the ranks of slurmft's own kinds of programs run: a run from elsewhere may name no other."""


@functools.cache
def kind_class(name: str) -> type[ProgramKind]:
    """Returns the class of a kind of program; that of any program for an unknown name."""
    entry = plugins.find(plugins.PROGRAMS, name)
    # A run may be of a package that is not installed here: it is listed all the same.
    if entry is None:
        return ProgramKind
    kind: type[ProgramKind] = entry.load()
    return kind
