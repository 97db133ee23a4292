"""The backend of the collectives, the same on all ranks.

Hosts may differ in what they have. Ranks that chose by themselves would then wait for each other
until a timeout: so each tells the others by the rendezvous store.
"""

import importlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import get_default_backend_for_device

from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.text import shown, some
from slurmft.job import devices
from slurmft.node import ccl
from slurmft.node.hardware import host_name


class Offer(NamedTuple):
    """What one rank can use."""

    host: str
    gpus: int
    """Those that its torch can use."""
    ccl_problem: str | None = None
    """Why it cannot use ccl, if that was tried."""
    gpu_problem: str | None = None
    """Why its torch cannot use the GPUs that are there."""
    processes: int = 1
    """Ranks of its node."""
    uuid: str | None = None
    """Of its GPU, where it sees one alone, and its node has more ranks."""
    gpu_backend: str = "nccl"


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
    # A driver that is asked about its GPUs takes memory of the host, at least.
    gpus, problem = devices.usable() if asked in ("auto", "nccl") else (0, None)
    tries_ccl = asked == "ccl" or (asked == "auto" and not (gpus or problem))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Offer(
        host=host_name(),
        gpus=gpus,
        ccl_problem=_import_binding() if tries_ccl else None,
        gpu_problem=problem,
        processes=processes,
        uuid=devices.uuid() if gpus == 1 < processes else None,
        gpu_backend=get_default_backend_for_device(devices.kind()),
    )


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
    oneCCL's binding and cannot use it. `nccl` means what the GPUs' vendor has in its place, too. Of
    equal offers, one is enough.

    Raises:
        UsageError: a host lacks what was asked for, or some have GPUs and others none.
        SlurmftError: some hosts (`bad_hosts`) cannot use their GPUs, and others can.
    """
    has_gpus = any(offer.gpus or offer.gpu_problem for offer in offers)
    if asked == "nccl" or (asked == "auto" and has_gpus):
        own = Counter(host for host, uuid in {(o.host, o.uuid) for o in offers} if uuid)
        few = [o for o in offers if max(o.gpus, own[o.host]) < o.processes]
        if not few:
            return offers[0].gpu_backend, None
        raise _too_few_gpus(asked, offers, few)
    problems = [(offer.host, offer.ccl_problem) for offer in offers if offer.ccl_problem]
    if asked == "gloo" or not problems:
        return ("gloo" if asked == "gloo" else "ccl"), None
    if asked == "ccl":
        raise UsageError(f"--backend ccl {_by_host(problems)}", ccl.hint())
    is_anywhere = {offer.ccl_problem for offer in offers} != {ccl.problem_of(None)}
    return "gloo", f"collectives use gloo; {_by_host(problems)}" if is_anywhere else None


def _too_few_gpus(asked: str, offers: Sequence[Offer], few: Sequence[Offer]) -> SlurmftError:
    """The error where not every process has a GPU."""
    counts = _by_host(
        (o.host, o.gpu_problem or f"{o.gpus} for {o.processes} process(es)") for o in offers
    )
    message = f"--backend {asked}: torch does not see a GPU for every process; {counts}"
    bad = sorted({o.host for o in few})
    if all(o.gpu_problem for o in few) and len(bad) < len({o.host for o in offers}):
        error = SlurmftError(message, f"look there; or: --sbatch exclude={','.join(bad)}")
        error.bad_hosts = bad
        return error
    hint = "request GPUs on every node (--gpus-per-node)"
    if any(o.gpu_problem for o in few):
        hint = "install a torch for these GPUs and their driver (https://pytorch.org)"
    return UsageError(message, f"{hint}, or compute on CPUs: --profile cpu")


def _by_host(found: Iterable[tuple[str, str]]) -> str:
    """What was found on which hosts: "on n1, n2: 4; on n3: 0"."""
    hosts: dict[str, list[str]] = {}
    for host, what in dict.fromkeys(found):
        hosts.setdefault(what, []).append(host)
    return "; ".join(f"on {some(names)}: {what}" for what, names in hosts.items())
