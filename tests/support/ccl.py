"""A stand-in for oneCCL's binding: gloo, with the manners of the real one (2.8, by experiment).

Where it is measured against gloo, $CCL_STAND_IN is "fast", "slow", "wrong", "dies" or "hangs"; the
last three on one rank alone.
"""

from __future__ import annotations

from pathlib import Path

SETVARS = """\
if [ "$(basename -- "$0")" = setvars.sh ]; then
    echo "   ERROR: Incorrect usage: this script must be sourced."
    return 255 2>/dev/null || exit 255
fi
export FROM_SETVARS=yes
"""

BINDING = """
import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist

OPERATIONS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]


class ProcessGroupCCL(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.has_transport = False

    def getBackendName(self):
        return "ccl"

    def check(self, tensors, op=None):
        if not self.has_transport:
            start_transport()
            self.has_transport = True
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise RuntimeError("input dense tensor has to be contiguous")
        if op is not None and not any(op == each for each in OPERATIONS):
            raise IndexError("map::at")

    def allreduce(self, tensors, options):
        self.check(tensors, options.reduceOp)
        if sys.argv[0].endswith("backend_probe.py"):
            tensors = probed(tensors)
        if tensors[0].dtype != torch.bool:
            return self.gloo.allreduce(tensors, options)
        as_bytes = [tensor.view(torch.uint8) for tensor in tensors]  # 1 + 1 is 2 then
        return self.gloo.allreduce(as_bytes, options)

    def broadcast(self, tensors, options):
        self.check(tensors)
        return self.gloo.broadcast(tensors, options)

    def allgather(self, outputs, inputs, options):
        self.check(inputs)
        return self.gloo.allgather(outputs, inputs, options)

    def barrier(self, options):
        self.check([])
        return self.gloo.barrier(options)

    def gather(self, outputs, inputs, options):
        self.check(inputs)
        if self.size() > 2:
            print("|CCL_ERROR| not completed event is destroyed", flush=True)
        return self.gloo.gather(outputs, inputs, options)

    def send(self, tensors, rank, tag):
        raise RuntimeError("oneccl_bindings_for_pytorch: send isn't implementd on backend [cpu].")

    recv = send


def probed(tensors):
    manner = os.environ.get("CCL_STAND_IN")
    if manner == "fast":  # these are zeros, but for one of them
        return [tensors[0][:1]]
    if manner == "slow":
        time.sleep(0.2)
    if os.environ["RANK"] == "1":
        if manner == "wrong":
            tensors[0] += 1
        if manner == "dies":
            print("Fatal error in internal_Comm_create_group", file=sys.stderr, flush=True)
            os._exit(143)
        if manner == "hangs":
            time.sleep(1000)
    return tensors


def start_transport():
    if os.environ.get("FROM_SETVARS") != "yes":
        raise RuntimeError("oneCCL: EXCEPTION: could not initialize any transport library")
    launched = any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID"))
    transport = os.environ.get("CCL_ATL_TRANSPORT", "mpi" if launched else "ofi")
    if transport == "mpi":
        if "I_MPI_HYDRA_UUID" not in os.environ:
            print("Fatal error in internal_Comm_create_group", file=sys.stderr, flush=True)
            os._exit(143)
        ctypes.CDLL(f"{sys.prefix}/lib/libmpi.so.12").MPI_Init(None, None)
    nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    if nodes > 1 and transport == "ofi" and "FI_TCP_IFACE" not in os.environ:
        time.sleep(1000)  # on an interface that does not lead to the others
    provider = os.environ.get("FI_PROVIDER", "shm")
    if nodes > 1 and transport == "ofi" and provider == "shm":
        time.sleep(1000)  # by memory that the others do not share


def make(store, rank, size, timeout):
    # Left behind, as by libfabric.
    open(f"/dev/shm/{os.getpid()}:{os.getuid()}:0", "w").close()
    print(f"process {os.getpid()}", flush=True)
    assert os.environ["CCL_LOCAL_RANK"] == os.environ["LOCAL_RANK"]
    print("made by the stand-in", flush=True)
    return ProcessGroupCCL(store, rank, size, timeout)


dist.Backend.register_backend("ccl", make, devices=["cpu"])
"""


def stand_in(folder: Path, version: str, module: str = BINDING) -> dict[str, str]:
    """Installs it into a folder; returns the variables by which it is found."""
    package = folder / "oneccl_bindings_for_pytorch"
    (package / "env").mkdir(parents=True)
    (package / "__init__.py").write_text(module)
    (package / "env" / "setvars.sh").write_text(SETVARS)
    info = folder / f"oneccl_bind_pt-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: oneccl_bind_pt\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


def torch_version() -> str:
    """Of the torch that is installed here: a binding of this version fits."""
    from importlib.metadata import version

    return version("torch")
