"""The Hugging Face hub: is a name local, does the hub answer, where is its cache."""

import os
import re
from pathlib import Path


def is_local(name: str) -> bool:
    """Whether a model or data set is meant as a folder: it is one, or it can be no hub id."""
    hub_id = re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name, re.ASCII)
    return hub_id is None or os.path.exists(os.path.expanduser(name))


def hub_in_reach(timeout_s: float = 10.0) -> bool:
    """Whether the Hugging Face hub answers this node, by whichever proxy is set.

    Asked once a node: without it every file of a model is retried for 20 s before the cache is
    looked at.
    """
    import http.client
    import urllib.error
    import urllib.request

    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_s
        ):
            return True
    except urllib.error.HTTPError:
        return True  # an answer, if an unfriendly one
    except (OSError, ValueError, http.client.HTTPException):
        return False


def hub_cache() -> Path:
    """Where this process's downloads go."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
