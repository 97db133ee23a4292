"""A training, as one rank runs it (started by `slurmft.train.rank`).

`run` is the page to read: it puts the parts together, and `Trainer.run` is the loop over them. The
optimizer step is the unit of everything: schedules, logs and limits count optimizer steps, whatever
the number of ranks and micro-steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
import transformers.modeling_utils  # noqa: F401 - models need it: time it as an import
from transformers.utils.logging import disable_progress_bar

from slurmft.job import Job
from slurmft.train.data.stream import (
    bucket_by_length,
    epoch_order,
    mixed_rows,
    prepared,
)
from slurmft.train.loop import batch_size_search, saved_model
from slurmft.train.loop import checkpoint as checkpoints
from slurmft.train.loop.checkpointing import Checkpointing, Stopped
from slurmft.train.loop.evaluator import Evaluator
from slurmft.train.loop.generators import Generators
from slurmft.train.loop.learner import Learner
from slurmft.train.loop.named_metrics import Deciding, NamedMetrics
from slurmft.train.loop.out_of_memory import answered, in_the_save, of_host_too
from slurmft.train.loop.position import Position
from slurmft.train.loop.reporter import Reporter
from slurmft.train.loop.saving import PatientSave, save_model
from slurmft.train.loop.setup import Setup, has_finished
from slurmft.train.loop.state import Part
from slurmft.train.metric_spec import LOSS
from slurmft.train.parallel.choice import choose_strategy
from slurmft.train.parallel.strategy import Strategy

# Logs are files: transformers' bars for loading and saving weights would only litter them.
disable_progress_bar()

_RESULT_BYTES = 2**14
"""Room that the result takes, about: for the message of a full disk."""


def run(job: Job, imports_s: float | None = None) -> None:
    """Does the work of a run, from its newest checkpoint on. An agreed stop ends it before its end;
    its state is saved then.

    Args:
        imports_s: see `Reporter`.
    """
    if has_finished(job):
        return
    # First of all: the sizes of a resumed run follow from its checkpoint, too.
    checkpoint = checkpoints.newest(job, job.join())
    setup = Setup.prepare(job, checkpoint)
    setup.check_steps()
    trainer = Trainer.build(setup, imports_s)
    trainer.reporter.start()
    if checkpoint:
        trainer.checkpointing.restore(checkpoint)
        changes = trainer.setup.changes(checkpoint)
        job.record(
            "resume",
            checkpoint=checkpoint.name,
            step=checkpoint.step,
            changes=changes,
        )
    try:
        with of_host_too():
            trainer.run()
    except Stopped:
        # A stop signal reaches any rank; all agreed to stop after the same step.
        trainer.checkpointing.save_last()
    except torch.OutOfMemoryError as error:
        raise answered(
            error,
            trainer.setup,
            trainer.learner.loaded,
            trainer.position,
            trainer.evaluator.most_samples,
        ) from error
    finally:
        trainer.evaluator.end()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """The parts of a training, and the loop over them. All ranks make the same calls."""

    setup: Setup
    strategy: Strategy
    position: Position
    learner: Learner
    evaluator: Evaluator
    deciding: Deciding
    reporter: Reporter
    checkpointing: Checkpointing

    @classmethod
    def build(cls, setup: Setup, imports_s: float | None = None) -> "Trainer":
        """Makes the parts, as at the start of a run."""
        strategy = choose_strategy(
            setup.config,
            setup.world,
            setup.precision,
            setup.task.evaluates_in_fp32,
        )
        position = Position()
        learner = Learner(setup, strategy)
        setup = batch_size_search.settled(setup, learner)
        # With the model a task knows which metrics it has.
        named_metrics = NamedMetrics(setup)
        best_by = named_metrics.best_by
        reporter = Reporter(setup, learner.loaded, imports_s, best_by)
        evaluator = Evaluator(
            setup,
            learner.loaded,
            setup.task,
            reporter.clock,
            strategy.evaluates_together,
            named_metrics=named_metrics,
        )
        # The reporter comes first: it raises where a loss is not finite, and no part is saved then.
        # The generators come last: other parts draw from them while they are restored.
        parts: dict[str, Part] = {
            "reporter": reporter,
            "position": position,
            "learner": learner,
            "evaluator": evaluator,
            "generators": Generators(setup.world),
        }
        return cls(
            setup=setup,
            strategy=strategy,
            position=position,
            learner=learner,
            evaluator=evaluator,
            deciding=named_metrics.deciding,
            reporter=reporter,
            checkpointing=Checkpointing(setup, strategy.saver(setup.job), parts),
        )

    def run(self) -> None:
        """Does what is left to do, to the end.

        Raises:
            Stopped: the ranks agreed to stop before it.
        """
        at = self.position
        # A resumed run begins in any phase: one that was evaluating goes on with that, and one that
        # was in its test split has no epoch left.
        while at.phase not in ("done", "test"):
            if at.phase == "train":
                self._train()
            else:
                self._evaluate()
        saves_best = self.setup.config.save == "best"
        # Without a best evaluation every value was NaN.
        if saves_best and at.since_best and at.best is not None:
            self._return_to_best()
        elif saves_best and at.best is None:
            self.setup.job.warn(
                f"no evaluation has a value of {self.deciding.name}: the last model is saved, not "
                "the best"
            )
        self._test()
        self._finish()

    # --- training ---------------------------------------------------------------------------------

    def _train(self) -> None:
        """Trains to the end of the epoch, to the next evaluation or to the step limit: to what
        comes first."""
        at = self.position
        job = self.setup.job
        self.learner.model.train()
        job.begin_phase()
        self.reporter.begin_window()
        self.reporter.clock.enter("train")
        # Both may be within an epoch. None is left where a stop came after the last step.
        evaluation = self.setup.plan.next_evaluation(at.evaluated)
        left = evaluation - at.step
        steps = islice(global_batches(self.setup, at.epoch, at.batch), left)
        # On a GPU each step's batches are made while the one before computes.
        make_batches = self.learner.micro_batches
        for samples, batches in prepared(steps, make_batches, self.setup.world.device):
            # Only where all ranks have the same weights: a checkpoint is what one of them has.
            can_save = self.strategy.is_synchronized_after(at.step + 1)
            if can_save:
                job.begin_step()
            # The ranks' requests to stop or save travel beside the step.
            step = self.learner.step(samples, batches)
            at.step += 1
            at.batch += 1
            self.reporter.step(at.step, step, len(samples), batches)
            self.strategy.end_step(at.step)
            job.step(at.step)
            if can_save:
                self.checkpointing.stop_or_save()
        self.strategy.synchronize()
        self.reporter.flush()
        self.reporter.clock.enter(None)
        is_last = at.step == self.setup.plan.total_steps
        if at.batch == self.setup.plan.steps_per_epoch or is_last:
            at.epoch += 1
            at.batch = 0
        if at.step == evaluation:
            at.phase = "evaluate"

    # --- evaluation -------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Measures the validation split, and decides what follows."""
        at = self.position
        boundary = self.checkpointing.stop_or_save
        at.metrics, at.by_class = self.evaluator.measure(self.setup.data, boundary)
        at.evaluated = at.step
        self.reporter.epoch(self.setup.plan.epochs(at.step), at.metrics)
        deciding = self.deciding
        is_best = False
        # The value is the same on every rank, and so are the decisions.
        if deciding.has_value(at.metrics):
            value = at.metrics[deciding.name]
            is_best = at.note_evaluation(value, deciding.lower_is_better)
        else:
            at.note_missing()
            self._warn_of_missing()
        self._choose_phase()
        # After the phase is chosen: a resume from it does not evaluate again.
        if is_best:
            self.checkpointing.save(is_best=True)

    def _warn_of_missing(self) -> None:
        """Warns of an evaluation that cannot be compared; metrics of --metric do so themselves."""
        name = self.deciding.name
        if name in (*self.setup.task.metric_names, LOSS):
            self.setup.job.warn(
                f"{name} is not finite in the evaluation after step {self.position.step}, which is "
                "not compared for the best by it: of labels or predictions that are all equal it "
                "cannot be computed"
            )

    def _choose_phase(self) -> None:
        """Decides, after an evaluation, whether training goes on."""
        at = self.position
        patience = self.setup.config.early_stopping
        is_last = at.step == self.setup.plan.total_steps
        evaluations = at.since_best - at.missing_since_best
        stops_early = patience is not None and evaluations >= patience
        at.phase = "done" if is_last or stops_early else "train"
        if stops_early and not is_last:
            metric = self.deciding.name
            self.setup.job.record(
                "early_stop",
                step=at.step,
                metric=metric,
                evaluations=evaluations,
            )

    def _test(self) -> None:
        """Measures the test split, if there is one: once, with the model that is saved."""
        test = self.setup.data.test
        if test is None:
            return
        self.position.phase = "test"
        samples = test.rows(test.validation)
        self.setup.job.say(f"evaluating the test split: {samples:,} samples")
        metrics, _ = self.evaluator.measure(test, self.checkpointing.stop_or_save)
        self.reporter.counts.evaluated += samples
        for name, value in metrics.items():
            self.position.test[f"test_{name}"] = value

    # --- the end ----------------------------------------------------------------------------------

    def _return_to_best(self) -> None:
        """Takes the weights and the metrics of the best evaluation."""
        self.setup.job.alive("save")
        metric = self.deciding.name
        last = self.position.metrics[metric]
        step = self.checkpointing.return_to_best(self.learner, self.position)
        if step is None:
            return
        best = self.position.metrics[metric]
        self.setup.job.record(
            "best_saved",
            step=step,
            epoch=self.setup.plan.epochs(step),
            metric=metric,
            best=best,
            last=last,
        )

    def _finish(self) -> None:
        """Saves the model and the result; the best checkpoint stays. Raises as
        `PatientSave.run`."""
        setup = self.setup
        at = self.position
        setup.job.alive("save")
        # A checkpoint that is still being written would come after the last of them is removed.
        self.checkpointing.wait()
        facts = self.reporter.result_facts(at.step, self.strategy.sends)
        if self.learner.skipped_steps is not None:
            facts["skipped_steps"] = self.learner.skipped_steps
        if at.by_class:
            facts["classes"] = at.by_class
        facts["pipeline"] = setup.task.facts.pipeline or setup.config.preset
        with in_the_save():
            save_model(setup, self.learner.loaded, self.strategy)
        # A sharded model is in parts on all ranks.
        if self.strategy.keeps_whole_model:
            loaded = self.learner.loaded
            facts["saved_model"] = setup.world.on_main(
                lambda: saved_model.compare(setup, loaded)
            )
        elif setup.world.is_main:
            setup.job.say(
                f"the saved model is not compared: with --shard {setup.config.shard} no process "
                "has the whole model"
            )
        # Last: a run with a result has finished, whatever happens after it (`has_finished`).
        result = PatientSave(setup.job, setup.world, "the result", _RESULT_BYTES)
        result.run(partial(self.reporter.finish, facts, at.metrics | at.test))
        setup.world.on_main(setup.job.remove_checkpoints)


def global_batches(setup: Setup, epoch: int, done: int = 0) -> Iterator[np.ndarray]:
    """Yields the rows of each optimizer step of an epoch: the same for every number of ranks.

    Args:
        epoch: its number, from 0.
        done: steps of it to leave out.
    """
    data = setup.data
    seed = setup.config.seed
    size = setup.plan.global_batch_size
    counts = setup.source_counts
    rows = mixed_rows(data.source_rows, counts, setup.config.data_seed, epoch)
    order = rows[epoch_order(len(rows), seed, epoch)]
    if setup.config.batching == "grouped":
        lengths = data.row_lengths(data.train)
        order = bucket_by_length(order, lengths, size, seed, epoch)
    end = setup.plan.steps_per_epoch * size
    for start in range(done * size, end, size):
        yield order[start : start + size]
