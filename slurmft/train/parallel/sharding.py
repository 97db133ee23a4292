"""Sharding (`--shard`): each rank keeps its share of weights, gradients and the optimizer's state.

FSDP2 gathers the weights of a layer when it computes, and sums gradients to the rank whose share
they are of. Accelerate ignores its plugin on CPUs: so torch's `fully_shard` is called here; what
comes around it (autocast, backward, optimizer) is Accelerate's. Checkpoints are torch's distributed
ones, as safetensors: their own format has a pickle in it.
"""

import contextlib
import json
import os
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed import fsdp
from torch.distributed.checkpoint import hf_storage, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from transformers.modeling_layers import GradientCheckpointingLayer

from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.files import fingerprint
from slurmft.job import Job
from slurmft.job.checkpoints import MANIFEST
from slurmft.job.process_group import World
from slurmft.train.config import TrainConfig
from slurmft.train.engine import cpu
from slurmft.train.engine.vocab_trim import is_shared
from slurmft.train.loop.checkpoint import Saver, Snapshot, Tensors, write
from slurmft.train.parallel.grad_comm import GradientCommunication

FOLDER = "sharded"
"""Of a checkpoint: the files of all ranks."""
_FILE_BYTES = 2**28
"""Of a file, about: torch makes it in memory before it writes it."""


class Sharding(GradientCommunication):
    """FSDP2, in place of DDP."""

    def __init__(self, config: TrainConfig, world: World, precision: str, in_fp32: bool) -> None:
        """
        Args:
            in_fp32: layers get weights in fp32 also in a bf16 run, as the task evaluates so.
        """
        super().__init__(config.grad_comm, world, precision)
        _check(config, world)
        self._mesh = _mesh(config.shard, world)
        of_weights = torch.bfloat16 if precision == "bf16" and not in_fp32 else None
        of_sums = torch.bfloat16 if self.used == "bf16" else torch.float32
        rounding = fsdp.MixedPrecisionPolicy(of_weights, of_sums)
        self._options: dict[str, Any] = {"mesh": self._mesh, "mp_policy": rounding}
        if config.cpu_offload:
            self._options["offload_policy"] = fsdp.CPUOffloadPolicy()

    # --- a model becomes sharded ------------------------------------------------------------------

    def in_turns(self, load: Callable[[], None]) -> None:
        """Has every rank load and shard its model, which is whole until then: one after the other
        on each node. Called on every rank."""
        for turn in range(max(self.world.all_objects(self.world.local_rank)) + 1):
            self.world.on_some(turn == self.world.local_rank, load)
        if self._mesh.ndim == 2:  # heads that nodes draw may differ in their last bits
            for weight in self._weights.values():
                sent = weight.detach().to_local().to(self.world.device)
                dist.broadcast(sent, group=self._mesh.get_group(0), group_src=0)
                weight.detach().to_local().copy_(sent)

    def shard(self, model: Any) -> None:
        """Leaves this rank its share of a model's weights."""
        name = type(model).__name__
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fsdp.fully_shard(module, **self._options)
        with contextlib.suppress(NotImplementedError):  # transformers' own: it does not say
            table = model.get_input_embeddings()
            if not is_shared(model, table):
                fsdp.fully_shard(table, **self._options)
        fsdp.fully_shard(model, **self._options)
        if hasattr(model, "generate"):  # gathers as a forward pass, until all ranks have done
            fsdp.register_fsdp_forward_method(model, "generate")
            model._is_fsdp_managed_module = True
        type(model).__name__ = name  # it gets into the configuration of the saved model
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
        self._model = model
        self._weights: dict[str, Any] = dict(model.named_parameters())
        first = {id(p): name for name, p in self._weights.items()}
        every = model.named_parameters(remove_duplicate=False)
        self._names = {name: first[id(p)] for name, p in every}
        if trim := cpu.glibc_trim():
            trim()  # the whole model's memory

    def prepare(self, accelerator: Any, model: Any, _: Any) -> Any:
        model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        if inner := getattr(model, "_original_forward", None):  # without hooks, too
            model._original_forward = lambda **inputs: model.unshard() or inner(**inputs)
        return model

    @torch.no_grad()
    def clip_grad_norm_(self, _: Any, norm: float) -> torch.Tensor:
        """Clips the gradients to a norm, that of all shares; returns what it was."""
        shares = [p.grad.to_local() for p in self._weights.values() if p.grad is not None]
        square = torch.stack([share.float().pow(2).sum() for share in shares]).sum()
        square = square.to(self.world.device)
        dist.all_reduce(square, group=self._mesh.get_group(self._mesh.ndim - 1))
        found = square.sqrt()
        factor = (norm / (found.double() + 1e-6)).clamp(max=1.0).to(shares[0])
        torch._foreach_mul_(shares, factor)
        return found

    # --- checkpoints ------------------------------------------------------------------------------

    def state(self, optimizer: torch.optim.Optimizer | None = None) -> Tensors:
        """This rank's shares of all that trains, of buffers, and of the optimizer's state."""
        trained = {n: p.detach() for n, p in self._weights.items() if p.requires_grad}
        state = {f"model.{name}": t for name, t in (trained | self._buffers()).items()}
        for name, weight in self._weights.items():
            moments = optimizer.state.get(weight, {}) if optimizer else {}
            state |= {f"optimizer.{name}.{kind}": t for kind, t in moments.items()}
        return state

    def _buffers(self) -> Tensors:
        state = self._model.state_dict()
        return {name: t for name, t in state.items() if name not in self._names}

    def load(self, path: Path, optimizer: Any = None, groups: Any = None) -> None:
        """Reads this rank's shares of a checkpoint, by whatever number of ranks it was written; and
        the state of an AdamW, with the settings `groups`. Called on every rank."""
        if optimizer:
            optimizer.load_state_dict({"state": {}, "param_groups": groups})
            for weight in (p for p in self._weights.values() if p.requires_grad):
                moments = {kind: torch.zeros_like(weight) for kind in ("exp_avg", "exp_avg_sq")}
                step = torch.zeros((), device=weight.to_local().device)
                optimizer.state[weight] = {"step": step} | moments
        reader = hf_storage.HuggingFaceStorageReader(str(path / FOLDER))
        state, group = self.state(optimizer), self.world.control
        with _failures():
            state_dict_loader.load(state, storage_reader=reader, process_group=group)

    # --- the whole model --------------------------------------------------------------------------

    def gather(self, folder: Path) -> None:
        """Gathers all weights on every rank, one by one; the main one writes them into files. No
        rank holds more than one beside its share. A failure to write is raised by `whole`: until
        the last the others gather."""
        self._unwritten: Exception | None = None
        for number, (name, weight) in enumerate(self._weights.items()):
            whole = weight.detach().to(self.world.device).full_tensor()
            if self.world.is_main and self._unwritten is None:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    save_file({name: whole.cpu()}, folder / f"{number}.safetensors")
                except (OSError, SafetensorError) as error:
                    self._unwritten = error

    def whole(self, folder: Path) -> Tensors:
        """All weights, mapped into memory from what `gather` has written, and buffers.

        Raises:
            OSError, SafetensorError: there was no room.
        """
        if self._unwritten:
            raise self._unwritten
        found = ChainMap(*map(load_file, folder.iterdir()))
        return {name: found[first] for name, first in self._names.items()} | self._buffers()


class ShardedSaver(Saver):
    """Writes checkpoints by all ranks, of which each writes its shares. All make the same calls.

    Training waits: a copy, to write beside it, would take the memory that sharding saves.
    """

    def __init__(self, job: Job, world: World) -> None:
        super().__init__(job)
        self._world = world

    def start(self, snapshot: Snapshot, best: bool = False) -> None:
        self._job.alive("save")
        checkpoint = self._job.checkpoint(snapshot.state["step"], snapshot.suffix, best)
        self._warn(snapshot, self._write(snapshot, checkpoint))

    def _agreed(self, value: bool) -> bool:
        return bool(self._world.share_object(value))

    def _write(
        self, snapshot: Snapshot, checkpoint: AbstractContextManager[Path | None]
    ) -> Exception | None:
        """A failure of one rank is that of all: then there is no checkpoint."""

        def write_rest() -> None:
            write(folder, snapshot)
            (folder / MANIFEST).write_text(json.dumps({"files": files}), encoding="utf-8")

        try:
            with ExitStack() as stack:
                folder = self._world.on_main(lambda: stack.enter_context(checkpoint))
                files = self._write_shares(folder / FOLDER, snapshot.sharded)
                self._world.on_main(write_rest)
                self._world.on_main(stack.close)
        except Exception as error:
            return error
        return None

    def _write_shares(self, folder: Path, shares: Tensors) -> dict[str, Any]:
        """Writes the shares of this rank. Returns fingerprints of the files of all ranks: the main
        one need not read them, nor see them, on a shared file system, at once."""
        self._world.on_main(folder.mkdir)
        file_of, size = {}, 0
        for name, tensor in shares.items():
            file_of[name] = 1 + size // _FILE_BYTES
            size += tensor.nbytes // self._world.size
        writer = hf_storage.HuggingFaceStorageWriter(str(folder), file_of, save_distributed=True)
        with _failures():
            state_dict_saver.save(shares, storage_writer=writer, process_group=self._world.control)
        files: dict[str, Any] = {}

        def note_own() -> None:
            for path in folder.glob(f"shard-{self._world.rank + 1:05d}-*"):
                files[f"{FOLDER}/{path.name}"] = fingerprint(path)

        self._world.on_some(True, note_own)
        return dict(ChainMap(*self._world.all_objects(files)))


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """A rank's failure is raised on all; torch's own, of all ranks, is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise OSError(str(next(iter(error.failures.values()))[0])) from error


def _check(config: TrainConfig, world: World) -> None:
    if not hasattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms"):
        raise UsageError(
            f"--shard needs torch 2.9 or later, and this is {torch.__version__}",
            "update torch, or leave --shard out",
        )
    if config.cpu_offload and world.device.type == "cpu":
        raise UsageError(
            "--cpu-offload is for GPUs, and this run computes on CPUs", "leave --cpu-offload out"
        )


def _mesh(shard: str, world: World) -> Any:
    """The ranks in which weights are divided: all; or (nodes, ranks of a node). SlurmftError where
    nodes have different numbers of ranks."""
    sizes = set(world.all_objects(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if shard == "full" or sizes == {world.size}:
        return init_device_mesh(world.device.type, (world.size,))
    if len(sizes) > 1:
        raise SlurmftError(
            f"--shard node needs as many processes on each node, and there are {sorted(sizes)}",
            "give --nproc-per-node, or use --shard full",
        )
    shape = world.size // min(sizes), min(sizes)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("nodes", "ranks"))
