"""Functions of bash that slurmft's scripts have: files of their own, which shellcheck reads."""

import functools
from pathlib import Path


@functools.cache
def functions(file: Path) -> str:
    """Returns the functions of a file as one line: what passes a script on, such as a login shell
    of another kind, may do so with one line alone.

    Each statement of the file ends with a semicolon, and comments begin with "# ".
    """
    parts = []
    for line in file.read_text(encoding="utf-8").splitlines():
        statement, _, _ = f" {line} ".partition(" # ")
        parts.append(statement.strip().removesuffix("\\"))
    return " ".join(filter(None, parts)).removesuffix(";")
