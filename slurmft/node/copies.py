"""Copies of shared folders that this node has on its own disk, as its ranks are told of them."""

import json
from collections.abc import Mapping

VARIABLE = "SLURMFT_STAGED"
"""JSON, shared folder -> its copy on this node. Unset: there are none."""


def of(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the copies: shared folder -> its copy on this node."""
    copies: dict[str, str] = json.loads(variables.get(VARIABLE, "{}"))
    return copies
