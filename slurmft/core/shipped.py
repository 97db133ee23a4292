"""Files that come with slurmft, installed or in a checkout: studies, published tables, batch
scripts, patches, a data set, and the versions that the tests ran with."""

import os
import shutil
from pathlib import Path

from slurmft.core.errors import UsageError
from slurmft.core.filesystem import absolute

FOLDER = Path(__file__).parents[1] / "shipped"
"""In a checkout, most of its entries are links to where the files live."""
KINDS = {
    "studies": "for slurmft study run NAME",
    "published": "for slurmft report NAME and --published NAME",
    "tickets": "a made-up data set, for slurmft submit --data",
    "sbatch": "batch scripts, for plain sbatch",
    "patches": "for historic releases of datasets and evaluate",
}
"""Folder -> what its files are for."""


def find(kind: str, given: str | Path) -> Path:
    """A path as it was given; the file that comes with slurmft, if nothing is there and the path is
    the name of one, with or without its ending."""
    ours = {name: file for file in files(kind) for name in (file.name, file.stem)}
    return ours.get(str(given), Path(given)) if not absolute(given).exists() else Path(given)


def files(kind: str) -> list[Path]:
    return sorted((FOLDER / kind).iterdir())


def copy(folder: Path) -> list[Path]:
    """Copies the files of all kinds below a folder; returns the new paths. A file that is there
    stays as it is. UsageError where the folder cannot be written."""
    written = []
    try:
        for kind in KINDS:
            (folder / kind).mkdir(parents=True, exist_ok=True)
            for file in files(kind):
                if not os.path.lexists(new := folder / kind / file.name):
                    written.append(Path(shutil.copyfile(file, new)))
    except OSError as error:
        problem = f"cannot write to {error.filename!r}: {error.strerror}"
        raise UsageError(problem, "give a folder that can be made, or is yours") from None
    return written
