"""The backend of the collectives, the same on all ranks.

Hosts may differ in what they have. Ranks that chose by themselves would then wait for each other
until a timeout: so each tells the others by the rendezvous store.
"""

import importlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import get_default_backend_for_device

from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.text import by_host, shown
from slurmft.job import devices
from slurmft.node import ccl
from slurmft.node.hardware import host_name


class Offer(NamedTuple):
    """The backends that one rank can use."""

    host: str
    gpus: int
    """GPUs that its torch can use."""
    ccl_problem: str | None = None
    """Why it cannot use ccl, if that was tried."""
    gpu_problem: str | None = None
    """Why its torch cannot use the GPUs that are there."""
    processes: int = 1
    """Ranks of its node."""
    uuid: str | None = None
    """Identifies its GPU, where it sees one alone, and its node has more ranks."""
    gpu_backend: str = "nccl"


def agree(requested: str, store: Any, rank: int, world_size: int) -> str:
    """Chooses the backend from the offers of all ranks; all of them call it.

    Args:
        requested: the value of --backend.
        store: the store of the rendezvous.

    Raises:
        SlurmftError: as `choose`.
    """
    keys = [f"backend/{each}" for each in range(world_size)]
    # By the store, because there is no process group yet: it needs the backend.
    own_offer = json.dumps(offer(requested))
    store.set(keys[rank], own_offer)
    if rank == 0:  # not all ranks, or the answers grow with their square
        store.wait(keys)
        lines = store.multi_get(keys)
        # Each once: the ranks of one node mostly offer the same.
        different_lines = dict.fromkeys(lines)
        store.set("backend", b"\n".join(different_lines))
    offers = []
    for line in store.get("backend").splitlines():  # waits for the main rank
        values = json.loads(line)
        offers.append(Offer(*values))
    store.set(f"{keys[rank]}/read", "")
    if rank == 0:  # the store may end with it
        store.wait([f"{key}/read" for key in keys])
    return choose(requested, offers)


def offer(requested: str) -> Offer:
    """Finds out what this rank can use. For ccl its binding is imported."""
    gpus = 0
    problem = None
    # Not for gloo or ccl: a driver that is asked about its GPUs takes memory of the host, at least.
    if requested in ("auto", "nccl"):
        gpus, problem = devices.usable()
    ccl_problem = None
    if requested == "ccl":
        ccl_problem = _import_binding()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
    uuid = None
    if gpus == 1 and processes > 1:
        # The one GPU that it sees may be others' too, if a site has bound them all to it.
        uuid = devices.uuid()
    return Offer(
        host=host_name(),
        gpus=gpus,
        ccl_problem=ccl_problem,
        gpu_problem=problem,
        processes=processes,
        uuid=uuid,
        gpu_backend=get_default_backend_for_device(devices.kind()),
    )


def _import_binding() -> str | None:
    """Imports oneCCL's binding, which registers the backend; returns why that fails, or None."""
    binding = ccl.find()
    if binding is None or binding.mismatch:
        return ccl.problem_of(binding)
    os.environ.update(ccl.rank_variables(os.environ))
    try:
        importlib.import_module(ccl.MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{ccl.MODULE} cannot be imported: {shown(str(error), 200)}"
    return None


def choose(requested: str, offers: Sequence[Offer]) -> str:
    """Chooses the requested backend. With auto, it is that of the GPUs, or else gloo.

    Args:
        requested: the value of --backend, or what the tasks of the nodes have measured to be faster
            (`slurmft.node.collectives`); `nccl` means what the GPUs' vendor has in its place, too.
        offers: those of all ranks; of equal ones, one is enough.

    Raises:
        UsageError: a host lacks what was requested, or some have GPUs and others none.
        SlurmftError: some hosts (`bad_hosts`) cannot use their GPUs, and others can.
    """
    has_gpus = any(offer.gpus or offer.gpu_problem for offer in offers)
    if requested == "nccl" or (requested == "auto" and has_gpus):
        return _choose_for_gpus(requested, offers)
    if requested != "ccl":
        return "gloo"
    problems = []
    for offer in offers:
        if offer.ccl_problem:
            problems.append((offer.host, offer.ccl_problem))
    if problems:
        raise UsageError(f"--backend ccl {by_host(problems)}", ccl.hint())
    return "ccl"


def _choose_for_gpus(requested: str, offers: Sequence[Offer]) -> str:
    """Returns the backend of the GPUs, if every process has a GPU of its own."""
    bound_gpus = {(offer.host, offer.uuid) for offer in offers if offer.uuid}
    bound_gpus_of = Counter(host for host, _ in bound_gpus)
    too_few = []
    for offer in offers:
        # Either each rank sees all GPUs of its node, or one alone: then those of all are counted.
        gpus_of_node = max(offer.gpus, bound_gpus_of[offer.host])
        if gpus_of_node < offer.processes:
            too_few.append(offer)
    if too_few:
        raise _too_few_gpus(requested, offers, too_few)
    return offers[0].gpu_backend


def _too_few_gpus(
    requested: str, offers: Sequence[Offer], too_few: Sequence[Offer]
) -> SlurmftError:
    """Returns the error where not every process has a GPU."""
    facts = []
    for offer in offers:
        fact = offer.gpu_problem or f"{offer.gpus} for {offer.processes} process(es)"
        facts.append((offer.host, fact))
    counts = by_host(facts)
    message = (
        f"--backend {requested}: torch does not see a GPU for every process; {counts}"
    )
    failed_hosts = sorted({offer.host for offer in too_few})
    have_broken_gpus = all(offer.gpu_problem for offer in too_few)
    all_hosts = {offer.host for offer in offers}
    if have_broken_gpus and len(failed_hosts) < len(all_hosts):
        hint = f"look there; or: --sbatch exclude={','.join(failed_hosts)}"
        error = SlurmftError(message, hint)
        error.bad_hosts = failed_hosts
        return error
    hint = "request GPUs on every node (--gpus-per-node)"
    if any(offer.gpu_problem for offer in too_few):
        hint = "install a torch for these GPUs and their driver (https://pytorch.org)"
    return UsageError(message, f"{hint}, or compute on CPUs: --profile cpu")
