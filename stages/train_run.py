"""One start of a training: where it goes on, when it saves, and how it stops."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stages.data.sequences import PackedSequences, PaddedSequences
from stages.interruption import Interrupted, StopSignals
from stages.measure.peak_memory import PeakMemory
from stages.params import CheckpointParams, Params, VariantParams
from stages.train_memory import OverBudgetError
from stages.train_results import TrainRecord
from stages.training.bad_steps import may_be_saved
from stages.training.checkpoint import CheckpointError
from stages.training.checkpoint_store import CheckpointStore
from stages.training.loop import CurveRow, Measurements, training_steps
from stages.training.parallel import Parallel
from stages.training.precision import PrecisionPolicy
from stages.training.ranks import ALONE, Ranks
from stages.training.state import TrainState


class TrainingStopped(Interrupted):
    """A signal stopped the training between two steps, or between two micro-batches of one."""

    def __init__(self, signal_name: str, outcome: str):
        super().__init__(signal_name)
        self.outcome = outcome


@dataclass(frozen=True)
class TrainRun:
    """What one start of a training is made from."""

    params: Params
    variant: str
    device: torch.device
    fingerprint: str
    store: CheckpointStore
    planned_micro_batch_size: int
    """What the params ask for; `params` here may have less, where memory ran out."""
    compile_cache: Path
    memory_budget_bytes: int | None
    ranks: Ranks = ALONE

    @property
    def techniques(self) -> VariantParams:
        return self.params.variants[self.variant]

    def with_micro_batch(self, size: int) -> "TrainRun":
        """The same global batch in other pieces."""
        techniques = self.techniques.model_copy(update={"micro_batch_size": size})
        variants = self.params.variants | {self.variant: techniques}
        return replace(self, params=self.params.model_copy(update={"variants": variants}))


def restored_record(run: TrainRun, state: TrainState) -> tuple[TrainRecord, bool]:
    """What is kept beside the newest good checkpoint, and whether there is one; fills `state` from it.

    Raises:
        CheckpointError: there are checkpoints and none is good.
    """
    try:
        restored = run.store.restore(state)
    except CheckpointError as error:
        raise CheckpointError(
            f"no checkpoint in {run.store.folder} can be used: {error}; `python -m stages.train "
            f"{run.variant} --fresh` or `make clean-work` starts over"
        ) from None
    if restored is None:
        return TrainRecord(run.planned_micro_batch_size), False
    if restored.damaged and run.ranks.is_first:
        say(f"train {run.variant}: {'; '.join(restored.damaged)}; the checkpoint before it is used")
    if not may_be_saved(state, run.params.training):
        raise CheckpointError(
            f"{restored.folder} is of a run that left out {int(state.skipped_steps)} bad steps and "
            f"training.max_bad_steps is {run.params.training.max_bad_steps}; raise it, or start over with "
            f"`python -m stages.train {run.variant} --fresh`"
        )
    record = TrainRecord.from_dict(restored.progress)
    if record.published is None and run.ranks.is_first:
        print(f"{run.variant}: going on after step {state.step} of {run.params.training.num_steps}")
    return record, True


def steps_with_checkpoints(
    run: TrainRun,
    state: TrainState,
    parallel: Parallel,
    sequences: PackedSequences | PaddedSequences,
    policy: PrecisionPolicy,
    record: TrainRecord,
    measurements: Measurements,
    signals: StopSignals,
) -> Iterator[CurveRow | None]:
    """Train to the end, saving in between; yields after every step, with the row where it made one.

    Of several ranks all do, and save and stop at the same steps. Rows go into `record` too. To be run inside
    `signals.deferred()`, but for the first step, which holds the compiler's work: stopped anywhere in it,
    there is nothing to save.

    Raises:
        TrainingStopped: a signal came; the state is saved.
    """
    store, training, ranks = run.store, run.params.training, run.ranks
    clock = SaveClock(run.params.checkpoints)
    steps = training_steps(
        state,
        sequences,
        run.params,
        run.variant,
        policy,
        measurements,
        lambda: signals.requested is not None,
        parallel,
    )
    first_step = state.step
    for row in steps:
        if row is not None:
            record.rows.append(row)
        yield row
        check_budget(run, measurements.peak)
        # Not while the second step of this process is measured: a copy of the state is memory too.
        is_inside = first_step + 2 <= state.step < training.num_steps
        is_due = is_inside and ranks.is_first and clock.is_due(state.step, store)
        if is_inside and ranks.sum_on_host([is_due])[0] and may_be_saved(state, training):
            store.save(state, record.at_checkpoint(measurements, store).to_dict())
            measurements.disturbed = True
        if store.is_writing():
            measurements.disturbed = True  # also the interval after, where the writing takes longer
        if (warning := store.take_warning()) and ranks.is_first:
            say(f"train {run.variant}: {warning}")
        if signals.requested and not ranks.has_others:  # else before the next step, all together
            break
    store.wait()
    if state.step < training.num_steps:
        signal_name = any_requested(signals, ranks)
        assert signal_name is not None, "nothing else ends the loop early"
        raise TrainingStopped(signal_name, _save_at_stop(run, state, record, measurements))


def any_requested(signals: StopSignals, ranks: Ranks) -> str | None:
    """The signal that asked any of the ranks to stop."""
    return next((name for name in ranks.gather(signals.requested) if name is not None), None)


def check_budget(run: TrainRun, peak: PeakMemory | None) -> None:
    """
    Raises:
        OverBudgetError: the measured step took more than `--memory-budget`; on a GPU with all that the
            allocator held for it.
    """
    budget = run.memory_budget_bytes
    if budget is not None and peak is not None and (taken := peak.reserved_bytes or peak.bytes) > budget:
        raise OverBudgetError(taken - budget, budget)


class SaveClock:
    """When the next in-progress checkpoint is due."""

    def __init__(self, checkpoints: CheckpointParams):
        self._checkpoints = checkpoints
        self._last = time.monotonic()

    def is_due(self, step: int, store: CheckpointStore) -> bool:
        """Asked after every step; never while the one before is being written."""
        minutes, every = self._checkpoints.every_minutes, self._checkpoints.every_steps
        by_time = minutes is not None and time.monotonic() - self._last >= minutes * 60
        by_step = every is not None and step % every == 0
        if not (by_time or by_step) or store.is_writing():
            return False
        self._last = time.monotonic()
        return True


def _save_at_stop(run: TrainRun, state: TrainState, record: TrainRecord, measurements: Measurements) -> str:
    """Save what there is; in words, what was saved."""
    if not may_be_saved(state, run.params.training):
        return "after a step whose loss is no number; the checkpoint before it is kept"
    where = f"after step {state.step} of {run.params.training.num_steps}"
    try:
        if run.store.written_step != state.step:
            run.store.save_now(state, record.at_checkpoint(measurements, run.store).to_dict())
    except OSError as error:
        return f"{where} and could not save ({error}); `dvc repro` goes on from the checkpoint before"
    return f"{where}, saved; `dvc repro` goes on from there"


def say(line: str) -> None:
    """Below the progress bar, where warnings and the last line go."""
    print(line, file=sys.stderr, flush=True)
