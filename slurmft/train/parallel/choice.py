"""Which strategy a run has."""

from slurmft.core.errors import SlurmftError
from slurmft.job.process_group import World
from slurmft.train import ipex
from slurmft.train.config import TrainConfig, local_steps, rounding
from slurmft.train.parallel import sharding
from slurmft.train.parallel.local_sgd import LocalSgd
from slurmft.train.parallel.replicated import Alone, Ddp
from slurmft.train.parallel.sharding import Fsdp
from slurmft.train.parallel.strategy import Strategy


def check(config: TrainConfig, world: World, precision: str) -> None:
    """Checks, before any data is read, that a strategy can work here.

    Raises:
        SlurmftError: options do not go together, with these devices or this torch.
    """
    if config.ipex:
        ipex.check_device(world.device.type == "cpu")
        ipex.check_package()
    if config.shard != "none":
        sharding.check(config, world)
    elif precision == "fp16" and world.size > 1 and local_steps(config.grad_comm):
        raise SlurmftError(  # ranks would skip different steps
            f"--grad-comm {config.grad_comm} cannot be used with fp16",
            "use --precision bf16 or fp32, or --grad-comm auto",
        )


def choose_strategy(
    config: TrainConfig,
    world: World,
    precision: str,
    evaluates_in_fp32: bool = False,
) -> Strategy:
    """Returns how this rank takes part in the training. Called on every rank.

    Args:
        precision: fp32, bf16 or fp16.
        evaluates_in_fp32: whether the task's metrics would show rounded logits.
    """
    if config.shard != "none":
        return Fsdp(config, world, precision, evaluates_in_fp32)
    if world.size == 1:
        return Alone(world)  # whatever --grad-comm says: there is nobody to send to
    period = local_steps(config.grad_comm)
    if period is not None:
        return LocalSgd(world, period)
    return Ddp(world, rounding(config.grad_comm, precision))
