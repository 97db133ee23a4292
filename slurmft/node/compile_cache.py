"""The cache of what torch compiles: a folder in which nobody else can have put code."""

import getpass
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from slurmft.core.trusted import Door

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
COMPILED = Door(
    "the cache of `torch.compile`",
    "`$TMPDIR/torchinductor_USER/`",
    "kernels and pickled graphs that torch loads",
    cure="set TORCHINDUCTOR_CACHE_DIR to a folder of yours",
)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that leads ranks to a cache of this user's; nothing where the user has
    set it.

    torch takes a folder in /tmp whose name everybody knows, also one that another user has made.
    """
    if VARIABLE in environment:
        return {}
    # As torch names it: what was compiled before is used.
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    usual = Path(tempfile.gettempdir(), f"torchinductor_{name}")
    try:
        folder = COMPILED.place(usual, denied=0o022)
        # Folders in it may be open to others by the umask under which they were made.
        folder.chmod(0o700)
    except OSError:
        # There is no room now, which others may have filled; torch would take whoever's folder has
        # its usual name. It makes one where it compiles, and nobody knows this name before.
        folder = usual.with_name(f"{usual.name}-{secrets.token_hex(8)}")
    return {VARIABLE: str(folder)}
