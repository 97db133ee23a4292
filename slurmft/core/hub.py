"""The Hugging Face hub: which names are its ids, whether it answers, where its cache is."""

import os
import re
import sys
from pathlib import Path

from slurmft.core.errors import UsageError

_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt", ".gz", ".xlsx")
"""Ends of the names of data files: nobody calls a data set of the hub so."""
NO_HUB_CURE = (
    "fetch where there is internet and copy the folder of $HF_HOME from there, or set https_proxy, "
    "or HF_ENDPOINT to a mirror"
)
"""Advice to who fetches on a machine that the hub does not answer."""
NO_NAME_CURE = (
    "look for its name on the hub; one that is private or gated needs: hf auth login"
)
"""Advice to who fetches what the hub does not have."""


class NotOnHubError(UsageError):
    """A model, data set or metric is in no cache, and was not found on the hub."""

    reason = ""
    """What the library that looked for it says, where it says anything."""

    def while_fetching(self) -> UsageError:
        """Returns the error for `slurmft fetch`, which a job's hint would advise."""
        cure = NO_HUB_CURE
        if not is_hub_offline():
            cure = NO_NAME_CURE
        return UsageError(self.message, cure)


def is_local(name: str) -> bool:
    """Returns True for the name of a model or data set that means a folder.

    It does if there is such a folder, or if the name can be no id of the hub, or is one of a file.
    """
    return not is_hub_id(name) or os.path.exists(os.path.expanduser(name))


def is_hub_id(name: str) -> bool:
    """Returns whether a name can be an id of the hub, and is none of a data file."""
    # The hub allows NAME and OWNER/NAME; a path has more parts, or begins with a slash or a dot.
    hub_id = re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name, re.ASCII)
    return hub_id is not None and not name.endswith(_SUFFIXES)


def check_id(flag: str, name: str) -> None:
    """Checks a name in a job, where folders have absolute paths: libraries would read a file or
    folder of that name in the present folder, which somebody has made since the submission.

    Raises:
        UsageError: there is one.
    """
    path = os.path.abspath(name)
    if is_hub_id(name) and os.path.lexists(path):
        raise UsageError(
            f"{flag} {name!r} is a name of the hub, and by now {path!r} has it, too",
            f"rename that; or submit anew, if you mean it: {flag} {path}",
        )


def is_hub_offline() -> bool:
    """Returns True if the user, or the node's task, has told the libraries to ask the hub for
    nothing."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def leave_out_kernels() -> None:
    """Lets transformers, which is not imported yet, take the package `kernels` for absent.

    With it, transformers fetches code of the hub and executes it, for kinds of models and of
    quantization that a `config.json` names; or what others have put into a cache that they share.
    """
    # As Python has it for a module that cannot be imported.
    sys.modules["kernels"] = None  # type: ignore[assignment]


def endpoint() -> str:
    """Returns the address of the hub, or of the mirror that stands for it."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def hub_in_reach(timeout_s: float = 10.0) -> bool:
    """Returns True if the hub answers this node, through the proxy that is set.

    Every node asks once: otherwise each file of a model would be retried for 20 s before the cache
    is looked at.
    """
    # Here: only nodes and `slurmft doctor` ask the hub.
    import http.client
    import urllib.error
    import urllib.request

    try:
        request = urllib.request.Request(endpoint(), method="HEAD")
        with urllib.request.urlopen(request, timeout=timeout_s):
            return True
    # The server has answered, though with an error.
    except urllib.error.HTTPError:
        return True
    # ValueError: the variable holds no URL.
    except (OSError, ValueError, http.client.HTTPException):
        return False


def hub_cache() -> Path:
    """Returns the folder that downloads of this process go to."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def datasets_cache() -> Path:
    """Returns the folder of data sets that the datasets library has loaded, without importing
    it."""
    from huggingface_hub import constants

    folder = os.environ.get("HF_DATASETS_CACHE")
    return Path(folder or os.path.join(constants.HF_HOME, "datasets")).expanduser()
