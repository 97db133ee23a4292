"""How many samples a rank's memory holds at a time, as far as this run has found out (memory.json).

A rank that runs out of memory writes the file; all ranks start again, and take it from the main
one. The global batch stays: more micro-steps make it up.
"""

from dataclasses import asdict, dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from slurmft.core import decode
from slurmft.core.errors import SlurmftError
from slurmft.core.run_files import SampleLimits
from slurmft.job.process_group import World
from slurmft.runs.rundir import RunDir
from slurmft.train.loop.step_plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimits(SampleLimits):
    """Limits of a run, which all ranks share."""

    @classmethod
    def read(cls, run: RunDir) -> "MemoryLimits":
        return decode.read(run.memory, cls) or cls()

    @classmethod
    def shared(cls, run: RunDir, world: World) -> "MemoryLimits":
        """Returns the limits that the main rank reads, on every rank."""
        return cls(**world.on_main(lambda: asdict(cls.read(run))))


NO_LIMITS = MemoryLimits()


def note(run: RunDir, limits: MemoryLimits) -> None:
    """Notes limits for the next start of the ranks, beside those that are noted. Ranks that do so
    at once write the same."""
    both = asdict(MemoryLimits.read(run))
    for name, samples in asdict(limits).items():
        if samples is not None:
            both[name] = samples
    run.tell(run.memory, both, f"samples at a time that memory holds: {both}")


def check_batch_norms(plan: Plan, model: nn.Module) -> None:
    """Raises SlurmftError where fewer samples at a time, or other batches on another number of
    nodes, would be another training."""
    if plan.is_auto and has_batch_statistics(model):
        raise SlurmftError(
            "--batch-size auto cannot be used with a model that has batch norms: with other "
            "samples at a time they train otherwise",
            "give the number: --batch-size 8",
        )
    if plan.micro_batch_size < plan.batch_size and has_batch_statistics(model):
        raise SlurmftError(
            f"memory was too small for --batch-size {plan.config.batch_size}, and the model has "
            "batch norms, which with fewer samples at a time train otherwise",
            f"submit a new run, with --batch-size {plan.micro_batch_size} or more memory",
        )
    if plan.parts != plan.parts_before and has_batch_statistics(model):
        raise SlurmftError(
            f"{plan.parts} batches rather than {plan.parts_before} make up a step on this number "
            "of nodes, and the model has batch norms, which with other batches train otherwise",
            "resume it on as many nodes as it had: slurmft resume with its --nodes",
        )


def has_batch_statistics(model: nn.Module) -> bool:
    """Returns whether a training step depends on which samples are in a batch together."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())
