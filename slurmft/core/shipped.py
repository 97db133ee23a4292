"""Files that come with slurmft, installed or in a checkout: studies, published tables, batch
scripts, patches, a data set, the documentation, and the versions that the tests ran with."""

import os
from pathlib import Path

from slurmft.core.errors import UsageError
from slurmft.core.files import named_by_user, read_bytes, write_bytes
from slurmft.core.filesystem import absolute
from slurmft.core.filesystem import reason as reason_of

FOLDER = Path(__file__).parents[1] / "shipped"
"""In a checkout, most of its entries are links to where the files live."""
KINDS = {
    "studies": "for slurmft study run NAME",
    "published": "for slurmft report NAME and --published NAME",
    "tickets": "a made-up data set, for slurmft submit --data",
    "sbatch": "batch scripts, for plain sbatch",
    "patches": "for historic releases of datasets and evaluate",
    "skill": "for an assistant's folder of skills",
}
"""Folder -> what its files are for."""


def find(kind: str, path: str | Path) -> Path:
    """Returns a path that exists as it is; else the file that comes with slurmft under that name.

    The name may lack its ending. A path that is neither stays as it is.
    """
    # A user's own file of that name comes first.
    if absolute(path).exists():
        return Path(path)
    return of_name(kind, str(path)) or Path(path)


def of_name(kind: str, name: str) -> Path | None:
    """Returns the file that comes with slurmft under a name, which may lack its ending; None: there
    is none."""
    for file in files(kind):
        if name in (file.name, file.stem):
            return file
    return None


def files(kind: str) -> list[Path]:
    """Returns the files of a kind, by their names."""
    return sorted((FOLDER / kind).iterdir())


def pages() -> list[Path]:
    """Returns the pages of the documentation."""
    return sorted((FOLDER / "docs").glob("*.md"))


def copy(folder: Path) -> list[Path]:
    """Copies the files of all kinds below a folder; a file that is there stays as it is.

    Returns:
        The new paths.

    Raises:
        UsageError: the folder cannot be written.
    """
    written = []
    try:
        for kind in KINDS:
            (folder / kind).mkdir(parents=True, exist_ok=True)
            for file in files(kind):
                copy_of_file = folder / kind / file.name
                # A link that leads nowhere is there as well: the copy would be written through it.
                if not os.path.lexists(copy_of_file):
                    write_bytes(named_by_user(copy_of_file), read_bytes(file))
                    written.append(copy_of_file)
    except OSError as error:
        reason = reason_of(error, folder)
        problem = f"cannot write to {error.filename!r}: {reason}"
        hint = "give a folder that can be made, or is yours"
        raise UsageError(problem, hint) from None
    return written
