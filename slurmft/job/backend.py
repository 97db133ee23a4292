"""The backend of the collectives, the same on all ranks.

Hosts may differ in what they have. Ranks that chose by themselves would then wait for each other
until a timeout: so each tells the others by the rendezvous store.
"""

import importlib
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from slurmft.core.errors import UsageError
from slurmft.core.text import shown, some
from slurmft.node import ccl
from slurmft.node.hardware import host_name


class Offer(NamedTuple):
    """What one rank can use."""

    host: str
    gpus: int
    ccl_problem: str | None = None
    """Why it cannot use ccl, if that was tried."""


def agree(asked: str, store: Any, rank: int, world_size: int) -> tuple[str, str | None]:
    """As `choose`, by what all ranks offer; all of them call it."""
    keys = [f"backend/{each}" for each in range(world_size)]
    store.set(keys[rank], json.dumps(offer(asked)))
    if rank == 0:  # not all ranks, or the answers grow with their square
        store.wait(keys)
        store.set("backend", b"\n".join(dict.fromkeys(store.multi_get(keys))))
    offers = [Offer(*json.loads(line)) for line in store.get("backend").splitlines()]
    store.set(f"{keys[rank]}/read", "")
    if rank == 0:  # the store may end with it
        store.wait([f"{key}/read" for key in keys])
    return choose(asked, offers)


def offer(asked: str) -> Offer:
    """What this rank can use. Where ccl may be chosen, its binding is imported."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tries_ccl = asked == "ccl" or (asked == "auto" and not gpus)
    return Offer(host_name(), gpus, _import_binding() if tries_ccl else None)


def _import_binding() -> str | None:
    """Imports oneCCL's binding, which registers the backend; why that cannot be, or None."""
    binding = ccl.find()
    if binding is None or binding.mismatch:
        return ccl.problem_of(binding)
    os.environ.update(ccl.rank_variables(os.environ))
    try:
        importlib.import_module(ccl.MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{ccl.MODULE} cannot be imported: {shown(str(error), 200)}"
    return None


def choose(asked: str, offers: Sequence[Offer]) -> tuple[str, str | None]:
    """The backend asked for, or the fastest that all ranks can use; and a warning, if hosts have
    oneCCL's binding and cannot use it.

    Raises:
        UsageError: a host lacks what was asked for, or some have GPUs and others none.
    """
    has_gpus = [offer.gpus > 0 for offer in offers]
    if asked == "nccl" or (asked == "auto" and any(has_gpus)):
        if all(has_gpus):
            return "nccl", None
        counts = _by_host((offer.host, str(offer.gpus)) for offer in offers)
        raise UsageError(
            f"--backend {asked}: not every host has GPUs that torch sees; {counts}",
            "request GPUs on every node (--gpus-per-node), or none: --backend gloo --profile cpu",
        )
    problems = [(offer.host, offer.ccl_problem) for offer in offers if offer.ccl_problem]
    if asked == "gloo" or not problems:
        return ("gloo" if asked == "gloo" else "ccl"), None
    if asked == "ccl":
        raise UsageError(f"--backend ccl {_by_host(problems)}", ccl.hint())
    is_anywhere = {offer.ccl_problem for offer in offers} != {ccl.problem_of(None)}
    return "gloo", f"collectives use gloo; {_by_host(problems)}" if is_anywhere else None


def _by_host(found: Iterable[tuple[str, str]]) -> str:
    """What was found on which hosts: "on n1, n2: 4; on n3: 0"."""
    hosts: dict[str, list[str]] = {}
    for host, what in dict.fromkeys(found):
        hosts.setdefault(what, []).append(host)
    return "; ".join(f"on {some(names)}: {what}" for what, names in hosts.items())
