"""The learner: a model with its optimizer, its schedule and its scaler; and one step of it."""

import contextlib
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from slurmft.core.errors import SlurmftError
from slurmft.train import ipex
from slurmft.train.data.tables import Batch
from slurmft.train.engine import freezing
from slurmft.train.engine.cpu import Heap
from slurmft.train.engine.evaluating import evaluating
from slurmft.train.loop.coupling import loss_and_gradient
from slurmft.train.loop.generators import rng_state, set_rng_state
from slurmft.train.loop.incomputable import in_backward, in_precision
from slurmft.train.loop.loaded_model import LoadedModel
from slurmft.train.loop.memory_limits import check_batch_norms
from slurmft.train.loop.setup import Setup
from slurmft.train.loop.state import State
from slurmft.train.parallel.optim import make_optimizer, make_scheduler, steps_taken
from slurmft.train.parallel.strategy import Strategy

STEADIER = (
    "lower --learning-rate, lengthen --warmup-ratio, or use --precision bf16 or fp32"
)
"""What to do where numbers are no longer finite."""

_TRIED = 64
"""Samples of which the shortest one shows which weights the loss uses."""
_UNFINISHED = "Expected to have finished reduction"
"""Part of what torch's DistributedDataParallel says where a weight got no gradient."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """This rank's part of one micro-step."""

    batch: Batch
    counts: bool
    """A rank without a share computes any sample with weight 0: the others wait for it."""


@dataclass(frozen=True, slots=True)
class CoupledPart:
    """A micro-batch of a loss that couples all rows, before its gradients are known."""

    micro_batch: MicroBatch
    vectors: torch.Tensor
    random_state: dict[str, Any] | None
    """The state of the generators that dropout has drawn from; None: the vectors have their
    graph."""


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one optimizer step."""

    loss: Any
    """This rank's share of the mean loss over the global batch, on the device. Summed over all
    ranks, the shares give that mean."""
    norm: Any | None
    """The norm of the gradients, on the device; None: nobody computed it, or a scaler skips steps
    by it."""
    learning_rate: float
    """The rate that it used."""


class Learner:
    """The model that trains, as one rank has it. All ranks make the same calls."""

    def __init__(self, setup: Setup, strategy: Strategy) -> None:
        self._setup = setup
        self._world = setup.world
        self._task = setup.task
        self._table = setup.data.train
        self._strategy = strategy
        self._heap = Heap(os.environ)
        self._has_checked_count = False
        self._accelerator = make_accelerator(setup)
        _fetch(setup)
        strategy.load_model(self._load_model)
        model = self.loaded.model
        check_batch_norms(setup.plan, model)
        self.optimizer = make_optimizer(
            model,
            setup.plan,
            divided=strategy.has_equal_gradients,
        )
        if strategy.waits_for_all_gradients:
            strategy.may_lack_gradients = self._may_lack_gradients()
        if setup.config.ipex:
            model, self.optimizer = ipex.optimize(model, self.optimizer)
        self.model = strategy.wrap(self._accelerator, model, self.optimizer)
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self.scaler = self._accelerator.scaler
        self.scheduler = make_scheduler(self.optimizer, setup.plan)
        # Dropout differs between ranks; numpy takes seeds of 32 bits alone.
        seed = setup.config.seed + 1 + setup.world.rank
        set_seed(seed % 2**32)

    def _load_model(self) -> None:
        # A share of a layer can neither be trimmed nor computed together with others.
        is_whole = self._strategy.keeps_whole_model
        self.loaded = LoadedModel(
            self._setup, trims=is_whole, fuses=is_whole, trains=True
        )
        self._strategy.divide(self.loaded.model)

    def _may_lack_gradients(self) -> bool:
        """Returns whether the loss leaves weights unused that train, as those of BigBird's pooler
        where words have labels; all ranks are told alike."""
        table = self._table
        lengths = self._setup.data.row_lengths(table)
        first = np.arange(min(len(lengths), _TRIED))
        if table.label_counts is not None:  # one without a label has no loss
            first = first[table.label_counts[first] > 0]
        # Short: on a GPU node, too, the model is still on the CPU.
        order = np.argsort(lengths[first], kind="stable")
        row = first[order[:1]]
        if not len(row):
            return False
        model = self.loaded.model
        batch = self._batch(row)
        self.loaded.expect(batch, table, torch.device("cpu"))
        with evaluating(model):
            loss, _ = self._task.loss(model(**batch.inputs), batch)
        used = _weights_in_graph(loss)
        unused = [
            p for p in model.parameters() if p.requires_grad and id(p) not in used
        ]
        return any(self._world.all_values(float(len(unused))))

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return int(self.scheduler.last_epoch)

    @property
    def skipped_steps(self) -> int | None:
        """Steps that moved no weight, as their gradients overflowed in fp16; None in others."""
        if not self.scaler:
            return None
        return self.steps - steps_taken(self.optimizer)

    # --- a step -----------------------------------------------------------------------------------

    def micro_batches(self, rows: np.ndarray) -> list[MicroBatch]:
        """Returns this rank's part of a global batch for each micro-step. Any thread may call
        it."""
        # The last batch of an epoch is small: some parts may be empty.
        parts = np.array_split(rows, self._setup.plan.parts)
        # A micro-step takes neighbouring parts, one for each rank.
        own_parts = parts[self._world.rank :: self._world.size]
        return [self._micro_batch(part, rows) for part in own_parts]

    def _micro_batch(self, part: np.ndarray, rows: np.ndarray) -> MicroBatch:
        counts = len(part) > 0
        if not counts:
            part = rows[:1]  # any one: it weighs nothing
        return MicroBatch(self._batch(part), counts)

    def _batch(self, rows: np.ndarray) -> Batch:
        samples = self._setup.data.samples_of(rows)
        batch = self.loaded.batch(self._table, samples)
        return self._task.batch(batch, self._table)

    def step(self, rows: np.ndarray, micro_batches: list[MicroBatch]) -> Step:
        """Makes one optimizer step on a global batch.

        The loss is the mean over the terms of the global batch, however samples and their lengths
        divide among ranks and micro-steps.

        Args:
            rows: those of the whole global batch.
            micro_batches: what `micro_batches` made of them for this rank.
        """
        terms = self._task.count(self._table, rows)
        # Before the schedule goes on.
        learning_rate = self.scheduler.get_last_lr()[0]
        # A global batch may have no terms at all.
        weight = 1 / (terms or 1)
        if self._task.couples_rows:
            loss = self._backward_coupled(rows, micro_batches, weight)
        else:
            loss = self._backward_apart(micro_batches, weight)
        norm = self._update()
        return Step(loss, norm, learning_rate)

    def _backward_apart(
        self, micro_batches: list[MicroBatch], weight: float
    ) -> torch.Tensor:
        """Makes the gradients of a step; each micro-batch has a loss of its own."""
        losses = []
        for micro_batch in micro_batches:
            is_last = micro_batch is micro_batches[-1]
            # A batch of an empty part weighs nothing.
            weight_of_batch = micro_batch.counts * weight
            with self._sending(is_last):
                losses.append(self.backward(micro_batch.batch, weight_of_batch))
        # `sum` would begin with an integer, which is one kernel more on a GPU.
        first, *others = losses
        return sum(others, first)

    def _backward_coupled(
        self,
        rows: np.ndarray,
        micro_batches: list[MicroBatch],
        weight: float,
    ) -> torch.Tensor:
        """Makes the gradients of a step whose loss couples all rows, see `coupling`."""
        keeps_graph = len(micro_batches) == 1
        parts = [self._coupled_part(each, keeps_graph) for each in micro_batches]
        sizes = [len(part) for part in np.array_split(rows, self._setup.plan.parts)]
        ranks = self._world.size
        loss, gradient = loss_and_gradient(
            self._world,
            torch.cat([part.vectors.detach() for part in parts]),
            [sum(sizes[rank::ranks]) for rank in range(ranks)],
            self._task.coupled_loss,
        )
        gradients = torch.split(gradient, [len(part.vectors) for part in parts])
        for part, part_gradient in zip(parts, gradients, strict=True):
            with self._sending(is_last=part is parts[-1]):
                # The gradient of this product is that of the loss.
                product = (self._with_graph(part) * part_gradient).sum()
                self._propagate(product * weight)
        return (loss * weight).float()

    def _coupled_part(self, micro_batch: MicroBatch, keeps_graph: bool) -> CoupledPart:
        state = None
        if not keeps_graph:
            state = rng_state(self._world.device)
        with torch.set_grad_enabled(keeps_graph):
            vectors = self._vectors(micro_batch)
        return CoupledPart(micro_batch, vectors, state)

    def _with_graph(self, part: CoupledPart) -> torch.Tensor:
        """Returns the vectors of a part with the graph that made them."""
        if part.random_state is None:
            return part.vectors
        # With the dropout of the first time.
        set_rng_state(part.random_state, self._world.device)
        return self._vectors(part.micro_batch)

    def _vectors(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Returns the vectors of the rows of a micro-batch; none, where these do not count."""
        batch = self.loaded.sent(micro_batch.batch, self._table)
        vectors = self._task.vectors(self._output(batch), batch)
        # All weights have gradients of an empty part, too: the other ranks wait for them.
        return vectors[: len(vectors) * micro_batch.counts]

    def try_out(self, rows: np.ndarray) -> None:
        """Makes a backward pass of a batch, on this rank alone where it keeps the whole model. It
        changes gradients, and generators of random numbers, but nothing else."""
        self.model.train()
        batch = self.loaded.sent(self._batch(rows), self._table)
        model = self.model
        # The others need not come as far: nothing is to be sent.
        if isinstance(model, DistributedDataParallel):
            model = model.module
        output = model(**batch.inputs)
        if self._task.couples_rows:
            loss = self._task.vectors(output, batch).sum()
        else:
            loss, _ = self._task.loss(output, batch)
        torch.autograd.backward(loss)

    def settle(self, setup: Setup) -> None:
        """Takes the setup in which the size of micro-batches is settled, and forgets what was tried
        out for it."""
        self._setup = setup
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def computes_together(self) -> bool:
        """True if a rank cannot make a pass alone: the others wait for its shares."""
        return self._strategy.sends_every_micro_step

    @property
    def new_moments_bytes(self) -> int:
        """Memory that the optimizer takes in its first step, on this rank; 0 after that."""
        if self.optimizer.state:
            return 0
        taken = 0
        for weight in self._weights:
            share = weight
            if isinstance(share, DTensor):
                share = share.to_local()
            # AdamW has two numbers for each weight; Muon has fewer.
            taken += 2 * share.numel() * share.element_size()
        return taken

    def _sending(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Has ranks send each other the gradients of a backward pass, or keep them for later."""
        if is_last or self._strategy.sends_every_micro_step:
            return contextlib.nullcontext()
        keeps: contextlib.AbstractContextManager[Any] = self._accelerator.no_sync(
            self.model
        )
        return keeps

    def backward(self, batch: Batch, weight: float) -> torch.Tensor:
        """Makes gradients of this rank's part of a global batch. Returns its share of the mean
        loss.

        Args:
            weight: that of each term of the loss.
        """
        batch = self.loaded.sent(batch, self._table)
        loss, count = self._task.loss(self._output(batch), batch)
        # Once: to read the count waits for the device.
        if not self._has_checked_count:
            self._check_count(count, batch)
        loss = loss * weight
        self._propagate(loss)
        return loss.detach().float()

    def _output(self, batch: Batch) -> Any:
        """Returns the output of the model, for a batch on the device."""
        try:
            with in_precision(self._setup.precision, self.loaded.model):
                return self.model(**batch.inputs)
        except RuntimeError as error:
            if _UNFINISHED not in str(error):
                raise
            raise SlurmftError(
                f"the loss of step {self.steps} did not use all weights of the model, which ranks "
                "wait for",
                "switch off what leaves layers out (layerdrop in the model's config.json), or use "
                "--shard full",
            ) from error

    def _propagate(self, loss: torch.Tensor) -> None:
        """Makes the gradients of a share of the mean loss."""
        world_size = self._world.size
        scaled = loss
        # DDP divides the sum of the ranks' gradients by their number.
        if world_size > 1:
            scaled = loss * world_size
        if self.scaler:
            scaled = self.scaler.scale(scaled)
        model = self.loaded.model
        with in_backward(model), in_precision(self._setup.precision, model):
            torch.autograd.backward(scaled)
        self._heap.after_batch()  # a CPU's memory, which the allocator would keep

    def _update(self) -> Any | None:
        """Clips the gradients, and moves the weights. Returns the norm that the gradients had.

        fp16's scaler skips a step that overflows. The schedule goes on: it belongs to the steps, as
        the data does, and to skip with it would need to wait for the device in every step.
        """
        norm = None
        max_norm = self._setup.config.max_grad_norm
        if max_norm:
            if self.scaler:
                # The limit is for the gradients themselves.
                self.scaler.unscale_(self.optimizer)
            norm = self._strategy.clip_grad_norm_(self._weights, max_norm)
        if self.scaler:
            norm = None  # to overflow is no error
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _check_count(self, count: Any, batch: Batch) -> None:
        """Raises SlurmftError where the loss sums other terms than the task counts beforehand."""
        self._has_checked_count = True
        row_size = self._setup.data.row_size
        # A row that is in the batch twice counts twice.
        first_samples = batch.indices[batch.indices % row_size == 0]
        rows = first_samples // row_size
        counted = self._task.count(self._table, rows)
        if not math.isclose(float(count), counted, rel_tol=1e-6):
            task = self._setup.config.task
            raise SlurmftError(
                f"--task {task}: its loss sums {float(count):g} terms in the "
                f"first batch, its count() says {counted:g}",
                "the mean over ranks needs both alike: mend loss() or count() of the task",
            )

    # --- its state --------------------------------------------------------------------------------

    def state(self) -> State:
        """Returns all that trains, with optimizer, schedule and scaler.

        Raises:
            SlurmftError: weights are not finite: no checkpoint has them.
        """
        self._world.on_some(True, self._check_finite)
        state = self._strategy.state(self.loaded.model, self.optimizer)
        state.values["frozen"] = self.loaded.frozen_facts
        state.values["scheduler"] = self.scheduler.state_dict()
        state.values["scaler"] = self.scaler.state_dict() if self.scaler else None
        return state

    def load(self, state: State) -> None:
        """Takes back all that trains. UsageError where that is not what trains in this run."""
        assert state.checkpoint is not None
        name = state.checkpoint.name
        values = state.values
        frozen = self.loaded.frozen_facts
        self._world.on_main(lambda: freezing.check_same(name, values["frozen"], frozen))
        self._strategy.load(self.loaded, self.optimizer, state)
        self.scheduler.load_state_dict(values["scheduler"])
        self._strategy.restored(self._rehearse)
        # After the rehearsal, which a scaler would scale.
        if self.scaler and values["scaler"]:
            self.scaler.load_state_dict(values["scaler"])

    def load_weights(self, state: State) -> None:
        """Takes back the weights of a state, and nothing else of it."""
        self._strategy.load_weights(self.loaded, state)

    def _rehearse(self) -> None:
        """Makes one backward pass that changes nothing; none, where no step was made before."""
        if not self.steps:
            return
        self.model.train()
        count = self._setup.plan.step_samples
        # As in the last micro-step of a step, in which DDP sends.
        last_batch = self.micro_batches(np.arange(count))[-1]
        self.backward(last_batch.batch, 1 / count)
        self.optimizer.zero_grad(set_to_none=True)

    def _check_finite(self) -> None:
        """Raises SlurmftError where a weight of this rank is not finite."""
        shares = []
        for weight in self._weights:
            share = weight.detach()
            if isinstance(share, DTensor):
                share = share.to_local()
            if share.numel():  # a rank may have none of a small weight
                shares.append(share)
        # One number for all: to ask each weight would wait for the device as often.
        largest = torch.nn.utils.get_total_norm(shares, torch.inf)
        if not largest.isfinite():
            problem = f"weights are not finite after step {self.steps}"
            raise SlurmftError(problem, STEADIER)


def _weights_in_graph(loss: torch.Tensor) -> set[int]:
    """Returns the identities of the weights that a loss has gradients of."""
    weights = set()
    seen = set()
    functions: list[Any] = [loss.grad_fn]
    while functions:
        function = functions.pop()
        # Behind a residual connection many ways lead to one function: to follow each would take
        # longer with every layer, twice as long or more.
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):  # where the gradient of a weight arrives
            weights.add(id(function.variable))
        functions += [each for each, _ in function.next_functions]
    return weights


def make_accelerator(setup: Setup) -> Accelerator:
    """Returns Accelerate's part: autocast, and the wrapper of the model."""
    on_cpu = setup.world.device.type == "cpu"
    mixed_precision = setup.precision
    if mixed_precision == "fp32":
        mixed_precision = "no"
    return Accelerator(mixed_precision=mixed_precision, cpu=on_cpu)


def _fetch(setup: Setup) -> None:
    """Has few ranks fetch a model of the hub: the main one, then one of every other node, as its
    cache may be its own."""
    if not setup.job.config.program.needs_hub:
        return
    world = setup.world
    first_of_node = world.local_rank == 0 and not world.is_main
    # The main one first: on a shared cache the others then find the files.
    for fetches in (world.is_main, first_of_node):
        world.on_some(fetches, lambda: setup.task.model(setup.data))
