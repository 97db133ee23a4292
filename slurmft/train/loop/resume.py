"""The whole state of a training: collected for a checkpoint, and put back by a resume."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from slurmft.core.errors import SlurmftError, UsageError
from slurmft.job.checkpoints import BadCheckpointError, checkpoint_name, verify
from slurmft.train.engine import lora
from slurmft.train.loop import checkpoint
from slurmft.train.loop.checkpoint import Snapshot, copied
from slurmft.train.loop.reporter import OF_RANK, STEADIER
from slurmft.train.loop.state import (
    Position,
    Predicted,
    join_optimizer,
    rng_state,
    set_rng_state,
    split_optimizer,
)

if TYPE_CHECKING:
    from slurmft.train.loop.trainer import Training


def take_snapshot(training: "Training", is_best: bool = False) -> Snapshot | None:
    """The state of the run, in memory, on the main rank; on the others None, or their share.
    SlurmftError where losses, gradients or weights are not finite: no checkpoint has them."""
    world, sharding, position = training.world, training.sharding, training.position
    training.reporter.flush()
    world.on_some(True, lambda: _check_weights(training))
    training.clock.lap("train" if position.phase == "train" else "evaluate")
    counts = training.reporter.counts()
    predicted = Predicted.union(training.predicted)
    ranks = world.gather_objects((rng_state(world.device), counts, predicted))
    shares = sharding.state(training.optimizer) if sharding else {}
    if not world.is_main:
        return Snapshot("", {"step": position.step}, {}, shares) if shares else None
    generators, counts_of_ranks, parts = zip(*ranks, strict=True)
    predicted = Predicted.union(parts)
    suffix = checkpoint_suffix(position, len(predicted.samples), is_best)
    best = training.job.best_checkpoint
    if is_best:
        position.best_checkpoint = checkpoint_name(position.step, suffix)
    else:
        position.best_checkpoint = best.name if best else None
    optimizer_tensors, optimizer_groups = split_optimizer(training.optimizer)
    tensors = {"predicted": predicted.tensors()}
    if not sharding:
        tensors |= {"model": lora.trained(training.loaded.model), "optimizer": optimizer_tensors}
    counts |= {kind: sum(own[kind] for own in counts_of_ranks) for kind in OF_RANK}
    adapter, scaler = training.loaded.adapter, training.scaler
    state = _facts(training) | {
        "step": position.step,
        "position": dataclasses.asdict(position),
        "shard": training.config.shard,
        "global_batch_size": training.plan.global_batch_size,
        "tokens_sha256": training.tokens_sha256,
        "lora": adapter and adapter.facts,
        "scheduler": training.scheduler.state_dict(),
        "scaler": scaler.state_dict() if scaler else None,
        "optimizer": optimizer_groups,
        "rng": generators,
        "counts": counts,
        "phases_s": training.clock.seconds,
    }
    return Snapshot(suffix, json.loads(json.dumps(state)), copied(tensors), shares)


def checkpoint_suffix(position: Position, predicted: int, is_best: bool = False) -> str:
    """See `RunDir.checkpoint_names`, which sorts them."""
    if position.phase == "test":
        return f"-t{predicted:08d}"
    if predicted:
        return f"-e{predicted:08d}"
    return "-evaluated" if is_best or position.phase == "done" else ""


def _check_weights(training: "Training") -> None:
    weights = (p.detach() for p in training.weights)
    own = [p.to_local() if isinstance(p, DTensor) else p for p in weights]
    largest = torch.nn.utils.get_total_norm([p for p in own if p.numel()], torch.inf)
    if not largest.isfinite():
        step = training.position.step
        raise SlurmftError(f"weights are not finite after step {step}", STEADIER)


def find_checkpoint(training: "Training") -> Snapshot | None:
    """The newest checkpoint that is whole, read by the main rank for all."""
    path = training.job.latest_checkpoint()
    if path is None:
        return None
    tensors: dict[str, checkpoint.Tensors] = {}

    def read() -> tuple[str, dict[str, Any], list[str]]:
        found = checkpoint.read(path)
        _check_same_run(training, path, found.state)
        tensors.update(found.tensors)
        return found.suffix, found.state, list(tensors)

    suffix, state, files = training.world.on_main(read)
    shared = {file: training.world.share_tensors(tensors.get(file, {})) for file in files}
    return Snapshot(suffix, state, shared)


def _check_same_run(training: "Training", path: Path, state: dict[str, Any]) -> None:
    """Raises UsageError where the run cannot go on from a checkpoint."""
    before, now = state["shard"], training.config.shard
    if "none" in (before, now) and before != now:
        raise UsageError(
            f"{path.name} was written with --shard {before}, and this run has {now}",
            "put the run's config.json back as it was; or submit a new run",
        )
    if state.get("tokens_sha256", training.tokens_sha256) != training.tokens_sha256:
        raise UsageError(
            f"{path.name} was trained on other tokens than {training.run_dir.tokens} has now: "
            "a resume would mix two data sets",
            "bring data and tokenizer back as they were when the run started, and remove "
            "that folder; or submit a new run",
        )


def restore(training: "Training", found: Snapshot) -> None:
    """Continues from a checkpoint, exactly where it was taken."""
    state, world = found.state, training.world
    training.position = Position(**state["position"])
    step = training.position.step
    name = checkpoint_name(step, found.suffix)
    world.on_main(lambda: lora.check_same(name, state.get("lora"), training.loaded.adapter))
    if world.is_main:
        training.job.keep_as_best(training.position.best_checkpoint)
    if training.sharding:
        path = training.run_dir.checkpoints / name
        training.sharding.load(path, training.optimizer, state["optimizer"])
    else:
        training.loaded.load(found.tensors["model"])
        join_optimizer(training.optimizer, found.tensors["optimizer"], state["optimizer"])
    training.scheduler.load_state_dict(state["scheduler"])
    if step:
        _dry_run_backward(training)
    training.communication.restored()
    if training.scaler and state["scaler"]:
        training.scaler.load_state_dict(state["scaler"])
    if world.rank < len(state["rng"]):
        set_rng_state(state["rng"][world.rank], world.device)
    training.reporter.set_counts(state["counts"])
    training.clock.seconds.update(state["phases_s"])
    training.predicted = [Predicted.from_tensors(found.tensors["predicted"])]
    training.job.record("resume", checkpoint=name, step=step, changes=_changes(training, state))


def _facts(training: "Training") -> dict[str, Any]:
    """What a resume may change; users are told."""
    return {
        "world_size": training.world.size,
        "precision": training.precision,
        "backend": training.world.backend,
        "threads": torch.get_num_threads(),
    }


def _changes(training: "Training", state: dict[str, Any]) -> list[str]:
    changes = [f"{k} {state[k]} -> {v}" for k, v in _facts(training).items() if state[k] != v]
    size, plan = training.world.size, training.plan
    if state["world_size"] != size:
        changes.append(
            f"global batch stays {plan.global_batch_size}: {plan.micro_steps} micro-step(s) on "
            f"{size} process(es); dropout draws other numbers"
        )
    return changes


def _dry_run_backward(training: "Training") -> None:
    """One backward pass that changes nothing.

    DDP lays out its buckets anew after the first one. A sum over ranks rounds by the place in the
    bucket: without this, the first step after a resume would differ in its last bits from the same
    step of a run that was never interrupted.
    """
    training.model.train()
    samples = np.arange(min(training.plan.global_batch_size, len(training.data.train)))
    training.backward(training.parts(samples)[-1][0], 1 / len(samples))
    training.optimizer.zero_grad(set_to_none=True)


def return_to_best(training: "Training") -> None:
    """Weights (of the main rank, which saves them, or shares) and metrics of the best
    evaluation."""
    position = training.position

    def read() -> tuple[Path | None, dict[str, float]]:
        training.saver.wait()
        path = training.job.best_checkpoint
        try:
            if path is None:
                raise BadCheckpointError("it could not be saved")
            verify(path)
            best = checkpoint.read(path)
        except (OSError, BadCheckpointError) as error:
            training.job.warn(f"the model is the last one, not the best: {error}")
            return None, position.metrics
        if not training.sharding:
            training.loaded.load(best.tensors["model"])
        position.by_class = best.state["position"]["by_class"]
        return path, best.state["position"]["metrics"]

    path, position.metrics = training.world.on_main(read)
    if training.sharding and path:
        training.sharding.load(path)
