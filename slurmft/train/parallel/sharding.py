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

from slurmft.core import descent
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.files import fingerprint
from slurmft.job import Job
from slurmft.job.checkpoints import MANIFEST
from slurmft.job.process_group import World
from slurmft.train.config import TrainConfig, rounding
from slurmft.train.engine import cpu
from slurmft.train.engine.vocab_trim import is_shared
from slurmft.train.loop.checkpoint import Checkpoint, Saver, write
from slurmft.train.loop.state import State, Tensors
from slurmft.train.parallel.optim import split_optimizer
from slurmft.train.parallel.strategy import Strategy, TrainedModel

FOLDER = "sharded"
"""The folder of a checkpoint with the files of all ranks."""
_FILE_BYTES = 2**28
"""About the size of a file: torch makes it in memory before it writes it."""


class Fsdp(Strategy):
    """Torch's FSDP2, by which each rank keeps its share."""

    keeps_whole_model = False
    sends_every_micro_step = True
    evaluates_together = True

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        precision: str,
        evaluates_in_fp32: bool,
    ) -> None:
        """
        Args:
            evaluates_in_fp32: layers get weights in fp32 also in a bf16 run.
        """
        super().__init__(world)
        if world.size > 1:
            self.sends = rounding(config.grad_comm, precision)
        self._mesh = _mesh(config.shard, world)
        gathered_dtype: torch.dtype | None = None  # as they are kept, in fp32
        if precision == "bf16" and not evaluates_in_fp32:
            gathered_dtype = torch.bfloat16
        summed_dtype = torch.float32
        if self.sends == "bf16":
            summed_dtype = torch.bfloat16
        policy = fsdp.MixedPrecisionPolicy(gathered_dtype, summed_dtype)
        self._options: dict[str, Any] = {"mesh": self._mesh, "mp_policy": policy}
        if config.cpu_offload:
            self._options["offload_policy"] = fsdp.CPUOffloadPolicy()
        self._model: Any = None
        self._weights: dict[str, Any] = {}
        self._unwritten: Exception | None = None

    # --- a model becomes sharded ------------------------------------------------------------------

    def load_model(self, load: Callable[[], None]) -> None:
        """Has every rank load and shard its model, which is whole until then: one after the other
        on each node."""
        local_ranks = self.world.all_objects(self.world.local_rank)
        # A node need have no more memory than one whole model and the shares take.
        for turn in range(max(local_ranks) + 1):
            self.world.on_some(turn == self.world.local_rank, load)
        is_hybrid = self._mesh.ndim == 2
        if is_hybrid:
            self._copy_from_first_node()

    def _copy_from_first_node(self) -> None:
        """Makes the shares of all nodes the same: heads that nodes draw may differ in their last
        bits."""
        same_share = self._mesh.get_group(0)
        for weight in self._weights.values():
            share = weight.detach().to_local()
            # With --cpu-offload it is on the host, from where nccl does not send.
            sent = share.to(self.world.device)
            dist.broadcast(sent, group=same_share, group_src=0)
            share.copy_(sent)

    def divide(self, model: Any) -> None:
        class_name = type(model).__name__
        self._shard_modules(model)
        # FSDP renames the class, and the name gets into the configuration of the saved model.
        type(model).__name__ = class_name
        self._model = model
        # Only now: FSDP has put other parameters in the place of those that were there.
        self._weights = dict(model.named_parameters())
        # Shared weights have several names; `named_parameters` gives the first alone.
        first_names = {id(p): name for name, p in self._weights.items()}
        every_name = model.named_parameters(remove_duplicate=False)
        self._names = {name: first_names[id(p)] for name, p in every_name}
        # The memory of the whole model goes back to the system before the next rank loads its own.
        trim = cpu.glibc_trim()
        if trim:
            trim()

    def _shard_modules(self, model: Any) -> None:
        """Has each layer gathered by itself, the embedding table too; and all else with the
        model."""
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fsdp.fully_shard(module, **self._options)
        # transformers' own: it does not say
        with contextlib.suppress(NotImplementedError):
            table = model.get_input_embeddings()
            # A table that is the head's weight, too, has to be there for both.
            if not is_shared(model, table):
                fsdp.fully_shard(table, **self._options)
        fsdp.fully_shard(model, **self._options)
        # gathers as a forward pass, until all ranks have done
        if hasattr(model, "generate"):
            fsdp.register_fsdp_forward_method(model, "generate")
            # By this attribute of transformers `generate` goes on until all ranks have done.
            model._is_fsdp_managed_module = True
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no mean

    def wrap(
        self,
        accelerator: Any,
        model: Any,
        optimizer: torch.optim.Optimizer,
    ) -> Any:
        model = accelerator.prepare_model(
            model,
            device_placement=False,
            evaluation_mode=True,
        )
        # What evaluates in fp32 calls the forward pass below autocast, which has no hooks that
        # gather weights.
        inner = getattr(model, "_original_forward", None)
        if inner:

            def forward(**inputs: Any) -> Any:
                model.unshard()
                return inner(**inputs)

            model._original_forward = forward
        return model

    @torch.no_grad()
    def clip_grad_norm_(self, weights: list[torch.Tensor], norm: float) -> torch.Tensor:
        """Clips the gradients to a norm, that of all shares. Returns what it was."""
        shares = []
        squares = []
        for weight in self._weights.values():
            if weight.grad is None:  # frozen
                continue
            share = weight.grad.to_local()
            shares.append(share)
            squares.append(share.float().pow(2).sum())
        # With --cpu-offload they are on the host, where nccl does not sum.
        square = torch.stack(squares).sum().to(self.world.device)
        # The last dimension: nodes of a hybrid mesh have the same shares.
        dist.all_reduce(square, group=self._mesh.get_group(self._mesh.ndim - 1))
        norm_before = square.sqrt()
        # As torch's own clipping, which knows nothing of shares.
        factor = (norm / (norm_before.double() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(shares, factor.to(shares[0]))
        return norm_before

    # --- checkpoints ------------------------------------------------------------------------------

    def saver(self, job: Job) -> Saver:
        return ShardedSaver(job, self.world)

    def state(self, model: Any, optimizer: torch.optim.Optimizer) -> State:
        _, groups = split_optimizer(optimizer)
        return State({"optimizer": groups}, shares=self._shares(optimizer))

    def load(
        self,
        model: TrainedModel,
        optimizer: torch.optim.Optimizer,
        state: State,
    ) -> None:
        """Reads this rank's shares, and the state of an AdamW."""
        groups = state.values["optimizer"]
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
        # Room for what is read: torch reads into tensors that are there.
        for weight in self._weights.values():
            if weight.requires_grad:
                optimizer.state[weight] = {
                    "step": torch.zeros((), device=weight.to_local().device),
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": torch.zeros_like(weight),
                }
        shares = self._shares(optimizer)
        self._read(state, shares)

    def load_weights(self, model: TrainedModel, state: State) -> None:
        shares = self._shares()
        self._read(state, shares)

    def _shares(self, optimizer: torch.optim.Optimizer | None = None) -> Tensors:
        """Returns this rank's shares of all that trains, of buffers, and of the optimizer's
        state."""
        shares = {}
        for name, buffer in self._buffers().items():
            shares[f"model.{name}"] = buffer
        for name, weight in self._weights.items():
            if weight.requires_grad:
                shares[f"model.{name}"] = weight.detach()
            if optimizer:
                moments = optimizer.state.get(weight, {})
                for kind, moment in moments.items():
                    shares[f"optimizer.{name}.{kind}"] = moment
        return shares

    def _read(self, state: State, shares: Tensors) -> None:
        """Reads the files of a checkpoint into this rank's shares."""
        assert state.checkpoint is not None
        reader = hf_storage.HuggingFaceStorageReader(str(state.checkpoint / FOLDER))
        group = self.world.control
        with _failures():
            state_dict_loader.load(shares, storage_reader=reader, process_group=group)

    def _buffers(self) -> Tensors:
        # What is in the state and is no weight: every rank has all of it.
        state = self._model.state_dict()
        buffers = {}
        for name, tensor in state.items():
            if name not in self._names:
                buffers[name] = tensor
        return buffers

    # --- the whole model --------------------------------------------------------------------------

    def collect_weights(self, folder: Path) -> None:
        """Gathers all weights on every rank, one by one; the main one writes them into files. No
        rank holds more than one beside its share. A failure to write is raised by
        `collected_weights`: until the last the others gather."""
        self._unwritten = None
        for number, (name, weight) in enumerate(self._weights.items()):
            share = weight.detach().to(self.world.device)
            whole = share.full_tensor()
            if not self.world.is_main or self._unwritten:
                continue
            try:
                folder.mkdir(parents=True, exist_ok=True)
                save_file({name: whole.cpu()}, folder / f"{number}.safetensors")
            except (OSError, SafetensorError) as error:
                self._unwritten = error

    def collected_weights(self, folder: Path) -> Tensors | None:
        """Returns all weights, mapped into memory from their files, and buffers."""
        if self._unwritten:
            raise self._unwritten
        files = [load_file(path) for path in folder.iterdir()]
        weights = ChainMap(*files)
        # A weight that has two names is in the files by its first.
        whole = {name: weights[first] for name, first in self._names.items()}
        return whole | self._buffers()


class ShardedSaver(Saver):
    """Writes checkpoints by all ranks, of which each writes its shares. All make the same calls.

    Training waits: a copy, to write beside it, would take the memory that sharding saves.
    """

    def start(self, checkpoint: Checkpoint, best: bool = False) -> None:
        self._job.alive("save")
        folder = self._job.checkpoint(checkpoint.step, checkpoint.suffix, best)
        self._warn(checkpoint, self._write(checkpoint, folder))

    def save(self, checkpoint: Checkpoint, patience_s: float) -> bool:
        return self._save(checkpoint, patience_s)

    def _agreed(self, value: bool) -> bool:
        # All ranks write, and so all must try again, or none.
        return bool(self._world.share_object(value))

    def _write(
        self,
        checkpoint: Checkpoint,
        folder: AbstractContextManager[Path | None],
    ) -> Exception | None:
        """Writes a checkpoint by all ranks. Returns what went wrong, which is the same on all: a
        failure of one rank is that of all."""
        try:
            with ExitStack() as stack:
                # The main rank makes the folder, and closes it where all have written.
                path = Path(
                    self._world.on_main(lambda: str(stack.enter_context(folder)))
                )
                # Of the main rank. Each holds the run, and leads through that.
                path = descent.through(path)
                files = self._write_shares(path / FOLDER, checkpoint.shares)
                manifest = json.dumps({"files": files})

                def write_rest() -> None:
                    write(path, checkpoint)
                    (path / MANIFEST).write_text(manifest, encoding="utf-8")

                self._world.on_main(write_rest)
                self._world.on_main(stack.close)
        except Exception as error:
            return error
        return None

    def _write_shares(self, folder: Path, shares: Tensors) -> dict[str, Any]:
        """Writes the shares of this rank. Returns fingerprints of the files of all ranks: the main
        one need not read them, nor see them, on a shared file system, at once."""
        self._world.on_main(folder.mkdir)
        file_numbers = {}
        size_bytes = 0
        # `nbytes` is of the whole tensor, of which this rank writes a share.
        for name, tensor in shares.items():
            file_numbers[name] = 1 + size_bytes // _FILE_BYTES
            size_bytes += tensor.nbytes // self._world.size
        writer = hf_storage.HuggingFaceStorageWriter(
            str(folder),
            file_numbers,
            save_distributed=True,
        )
        group = self._world.control
        with _failures():
            state_dict_saver.save(shares, storage_writer=writer, process_group=group)
        files: dict[str, Any] = {}

        def note_files() -> None:
            for path in folder.glob(f"shard-{self._world.rank + 1:05d}-*"):
                files[f"{FOLDER}/{path.name}"] = fingerprint(path)

        self._world.on_some(True, note_files)
        files_of_ranks = self._world.all_objects(files)
        return dict(ChainMap(*files_of_ranks))


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raises a failure of any rank as an OSError on all: torch's own is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise OSError(str(first)) from error


def check(config: TrainConfig, world: World) -> None:
    """Raises UsageError where torch, or the device, cannot do what is asked for."""
    if not hasattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms"):
        raise UsageError(
            f"--shard needs torch 2.9 or later, and this is {torch.__version__}",
            "update torch, or leave --shard out",
        )
    if config.cpu_offload and world.device.type == "cpu":
        raise UsageError(
            "--cpu-offload is for GPUs, and this run computes on CPUs",
            "leave --cpu-offload out",
        )


def _mesh(shard: str, world: World) -> Any:
    """Returns the ranks among which weights are divided: all; or (nodes, ranks of a node).

    Raises:
        SlurmftError: nodes have different numbers of ranks.
    """
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    sizes = set(world.all_objects(local_size))
    # --shard node on one node is --shard full.
    if shard == "full" or sizes == {world.size}:
        return init_device_mesh(world.device.type, (world.size,))
    if len(sizes) > 1:
        raise SlurmftError(
            f"--shard node needs as many processes on each node, and there are {sorted(sizes)}",
            "give --nproc-per-node, or use --shard full",
        )
    nodes = world.size // local_size
    return init_device_mesh(
        world.device.type,
        (nodes, local_size),
        mesh_dim_names=("nodes", "ranks"),
    )
