"""The sizes of a run: how samples, ranks and micro-steps make up optimizer steps."""

import math
from dataclasses import dataclass, replace

from slurmft.train.config import AUTO, ResolvedConfig, evaluation_period

# Linear: Goyal et al. 2017, for SGD. The square root: Malladi et al. 2022, for Adam and its kind.
_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""--lr-rule -> the power of the batch's growth that the learning rate grows by."""


def limited(requested: int, limit: int | None) -> int:
    """Returns the most samples at a time, where memory may be too small for those requested."""
    if limit is None:
        return requested
    return min(requested, limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The sizes that follow from configuration, data and world size. The same on every rank."""

    config: ResolvedConfig
    world_size: int
    precision: str
    """fp32, bf16 or fp16: what was chosen, where the configuration says auto."""
    train_samples: int
    validation_samples: int
    least_rows: int = 1
    """Rows of the smallest step that an epoch may end with, see `Task.least_step_rows`."""
    resumed_batch_size: int | None = None
    """Global batch size of the run that this one continues: kept, whatever the number of ranks."""
    resumed_parts: int | None = None
    """Batches that made up a step of that run when its checkpoint was written."""
    memory_limit: int | None = None
    """The most samples of a rank's batch, where memory was too small for --batch-size, or that is
    auto."""
    absent_ranks: int = 0
    """Ranks that all of --nodes would have more, where Slurm gave fewer nodes."""

    @property
    def is_auto(self) -> bool:
        """True if memory decides how many samples a rank's batch has."""
        return self.config.batch_size == AUTO

    @property
    def batch_size(self) -> int:
        """The most samples of a rank's batch, where memory holds them."""
        if isinstance(self.config.batch_size, int):
            return self.config.batch_size
        return math.ceil(self.global_batch_size / self.world_size)

    @property
    def micro_batch_size(self) -> int:
        """The most samples of a rank's batch."""
        return limited(self.batch_size, self.memory_limit)

    @property
    def micro_steps(self) -> int:
        """Batches of a rank that make up one optimizer step."""
        # Rounded up: no part is larger than what fits into memory.
        most_at_once = self.world_size * self.micro_batch_size
        return math.ceil(self.global_batch_size / most_at_once)

    @property
    def parts(self) -> int:
        """Batches that make up one optimizer step: ranks times micro-steps."""
        return self.world_size * self.micro_steps

    @property
    def parts_before(self) -> int:
        """Batches of an optimizer step in the run that this one continues; of one that starts,
        where Slurm gives all of --nodes."""
        if self.resumed_parts:
            return self.resumed_parts
        return replace(self, world_size=self._all_ranks, absent_ranks=0).parts

    @property
    def largest_part(self) -> int:
        """Samples of the largest batch of a rank."""
        return math.ceil(self.step_samples / self.parts)

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step."""
        if self.resumed_batch_size:
            return self.resumed_batch_size
        return self.config.step_size(self._all_ranks)

    @property
    def limited_from(self) -> int | None:
        """Samples that steps were to have, where --max-global-batch-size made them smaller."""
        # A resumed run keeps its batch size, whatever this number of ranks would make.
        if self.resumed_batch_size is not None:
            return None
        requested = self.config.unlimited_step_size(self._all_ranks)
        if requested == self.global_batch_size:
            return None
        return requested

    @property
    def _all_ranks(self) -> int:
        """Ranks on all of --nodes, whose batch the run has on fewer nodes, too."""
        return self.world_size + self.absent_ranks

    @property
    def step_samples(self) -> int:
        """Samples of the largest optimizer step: an epoch may have fewer than a global batch."""
        return min(self.global_batch_size, self.train_samples)

    @property
    def growth(self) -> float:
        """How many times the reference batch an optimizer step takes; at least 1: what holds for
        the reference batch holds for smaller ones."""
        reference = self.config.reference_batch_size
        if reference is None:
            return 1.0
        return max(1.0, self.step_samples / reference)

    @property
    def optimizer(self) -> str:
        """adamw or muon: what was chosen, where the configuration says auto."""
        if self.config.optimizer != "auto":
            return self.config.optimizer
        # A larger batch leaves fewer steps, and Muon gets further in few.
        if self.growth > 1:
            return "muon"
        return "adamw"

    @property
    def learning_rate(self) -> float:
        """The peak of the schedule; Muon's, where it trains."""
        rate = self.config.learning_rate
        if self.optimizer == "muon" and self.config.muon_learning_rate:
            rate = self.config.muon_learning_rate
        return self._grown(rate)

    @property
    def adamw_learning_rate(self) -> float:
        """The peak for embeddings, norms and biases, which AdamW trains beside Muon: at Muon's rate
        accuracy was lower, in one pair of runs (results/measured/large_batch.json)."""
        return self._grown(self.config.learning_rate)

    @property
    def optimizer_reason(self) -> str:
        """Why this optimizer and this learning rate were chosen; "" where they were given."""
        reasons = []
        reference = self.config.reference_batch_size
        if self.config.optimizer == "auto" and reference:
            relation = "no more than"
            if self.growth > 1:
                relation = "more than"
            reasons.append(
                f"--optimizer auto: {self.step_samples:,} samples a step are {relation} "
                f"--reference-batch-size {reference:,}"
            )
        factor = self._grown(1.0)
        if factor > 1:
            rate = self.learning_rate / factor
            reasons.append(
                f"{rate:g} x {factor:.3g} by --lr-rule {self.config.lr_rule}"
            )
        return "; ".join(reasons)

    def _grown(self, rate: float) -> float:
        """Returns a learning rate of the reference batch, grown with the batch by --lr-rule."""
        power = _POWERS[self.config.lr_rule]
        return rate * math.pow(self.growth, power)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; the last one may be smaller."""
        steps, rest = divmod(self.train_samples, self.global_batch_size)
        if rest >= self.least_rows:
            steps += 1
        return steps

    @property
    def left_out(self) -> int:
        """Samples at the end of each epoch that are too few for a step."""
        rest = self.train_samples % self.global_batch_size
        if rest >= self.least_rows:
            return 0
        return rest

    def epochs(self, steps: int) -> float:
        """The epochs that so many optimizer steps are."""
        return round(steps / self.steps_per_epoch, 4)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.config.max_steps is None:
            return self.steps_of_epochs
        return min(self.steps_of_epochs, self.config.max_steps)

    @property
    def steps_of_epochs(self) -> int:
        """Optimizer steps of all epochs, without --max-steps."""
        return self.config.epochs * self.steps_per_epoch

    def next_evaluation(self, step: int) -> int:
        """The optimizer step after which the next evaluation is, where the last one was after
        `step`; 0: there was none. The last step always has one."""
        # A multiple of the period, also where a run goes on from a checkpoint between two.
        period = self.steps_between_evaluations
        following = (step // period + 1) * period
        return min(following, self.total_steps)

    @property
    def steps_between_evaluations(self) -> int:
        """Optimizer steps from one evaluation to the next."""
        period = evaluation_period(self.config.evaluate_every)
        if period is None:
            return self.total_steps
        steps, unit = period
        if unit == "epochs":
            steps *= self.steps_per_epoch
        return steps

    @property
    def evaluations(self) -> int:
        """Evaluations of the whole run."""
        return math.ceil(self.total_steps / self.steps_between_evaluations)
