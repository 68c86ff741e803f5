"""The train stage: `python -m stages.train VARIANT`.

Reads the tokens, trains the variant, and writes its checkpoint and curve (results: the same in every run
of the same params) and its measurements (of this run on this machine). It goes on from its last
checkpoint in the work folder, and however often it was stopped the results are those of a run that
never was.
"""

import argparse
import gc
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import torch

from stages.container_image import ContainerImageError, container_image
from stages.data.sequences import PackedSequences, PaddedSequences, SequencesError, make_sequences
from stages.data.token_files import TokenFileError
from stages.data.token_shards import TokenShards
from stages.device_lock import DeviceLockError, hold_device
from stages.fingerprint import train_fingerprint
from stages.interruption import EXIT_INTERRUPTED, Interrupted, StopSignals, stop_signals
from stages.measure.compilation import CompileWatch
from stages.measure.hardware import (
    HardwareError,
    describe_device,
    measure_matmul_flops_per_second,
)
from stages.measure.host_allocator import keep_freed_memory
from stages.measure.out_of_memory import FailedAllocation, failed_allocation
from stages.measure.peak_memory import highest
from stages.measure.units import UnitError, parse_bytes
from stages.memory.leaner_recipes import next_smaller_micro_batch
from stages.model.attention import attention_kernel
from stages.params import Params, ParamsError, load_params
from stages.planned import PlanError, planned_memory_bytes, planned_params
from stages.progress import TrainingProgress
from stages.tracking import project_root, work_root
from stages.train_end import SUMMARY, keep_and_publish, print_end, publish_again, training_facts
from stages.train_memory import DeviceFullError, OverBudgetError, check_memory, out_of_memory_message
from stages.train_ranks import (
    end,
    joined_ranks,
    leaving,
    rank_device,
    shared_work_folder,
    start_ranks,
    with_ranks,
)
from stages.train_results import TrainRecord, is_forced, texts_to_publish
from stages.train_run import (
    TrainingStopped,
    TrainRun,
    any_requested,
    check_budget,
    restored_record,
    say,
    steps_with_checkpoints,
)
from stages.train_tracking import run_tracker, track
from stages.training.bad_steps import BadStepError
from stages.training.checkpoint import CheckpointError
from stages.training.checkpoint_store import CheckpointStore
from stages.training.compilation import apply_compile
from stages.training.compile_cache import compiling, use_compile_cache
from stages.training.determinism import use_deterministic_kernels
from stages.training.device_rules import DeviceRuleError, check_device_rules
from stages.training.parallel import Parallel
from stages.training.precision import PrecisionError, set_float32_matmul
from stages.training.ranks import ALONE, Ranks, RanksError, ranks_of_environment
from stages.training.recompute import apply_recompute
from stages.training.state import initial_state
from stages.work_folder import WorkFolderError

TOKENS = Path("data/tokens")
TOKENS_META = TOKENS / "meta.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.train", description=__doc__)
    parser.add_argument("variant", help="a key of `variants` in params.yaml")
    parser.add_argument("--fresh", action="store_true", help="start over, whatever progress there is")
    parser.add_argument("--memory-budget", metavar="SIZE", help="use no more than this, such as 12GiB")
    options = parser.parse_args(arguments)
    name = f"train {options.variant}"
    signals: StopSignals | None = None
    ranks: Ranks | None = None
    try:
        ranks = ranks_of_environment()
        is_quiet = ranks is not None and not ranks.is_first  # or each rank would say that it was told to stop
        outcome = "`dvc repro` goes on from the last checkpoint"
        with stop_signals(name, outcome, is_quiet=is_quiet) as signals:
            signals.raise_if_requested()
            budget = None if options.memory_budget is None else parse_bytes(options.memory_budget)
            params = load_params()
            params.require_variant(options.variant)
            if ranks is not None or params.training.ranks == 1:
                ranks = ranks or ALONE
                timeout = params.hardware.collective_timeout_minutes
                with (
                    leaving(ranks, timeout, (*_MISTAKES, torch.AcceleratorError)),
                    hold_device(name, params.hardware.device),
                ):
                    train(
                        params,
                        options.variant,
                        signals,
                        ranks=ranks,
                        fresh=options.fresh,
                        memory_budget_bytes=budget,
                    )
                return 0
            return start_ranks(params, options.variant, sys.argv[1:] if arguments is None else arguments)
    except TrainingStopped as stopped:
        return end(name, f"stopped by {stopped.signal_name} {stopped.outcome}", EXIT_INTERRUPTED, ranks)
    except Interrupted as stopped:
        assert signals is not None, "only they raise it"
        problem = signals.message(stopped.signal_name).removeprefix(f"{name}: ")
        return end(name, problem, EXIT_INTERRUPTED, ranks)
    except _MISTAKES as error:
        return end(name, str(error), 1, ranks)
    except torch.AcceleratorError as error:
        reason = str(error).splitlines()[0]
        return end(name, f"the GPU failed ({reason}); `dvc repro` goes on from the last checkpoint", 1, ranks)


_MISTAKES = (
    UnitError,
    ParamsError,
    PlanError,
    DeviceLockError,
    HardwareError,
    PrecisionError,
    DeviceRuleError,
    TokenFileError,
    SequencesError,
    WorkFolderError,
    CheckpointError,
    BadStepError,
    DeviceFullError,
    ContainerImageError,
    RanksError,
    OSError,
)
"""What a user can mend; the message says how."""


_LOST_RANKS_SECONDS = 60.0


def train(
    written: Params,
    variant: str,
    signals: StopSignals,
    *,
    ranks: Ranks = ALONE,
    fresh: bool = False,
    memory_budget_bytes: int | None = None,
) -> None:
    """Train one variant from its last checkpoint to the end and publish its outs.

    Args:
        written: the params as they stand in the file; what they leave to the plan is read from it.
        signals: ask to stop.
        ranks: which one this process is of those that train together; the first publishes.
        fresh: start over.
        memory_budget_bytes: run out of memory at this much. A GPU's allocator stops there; a CPU's cannot, so
            there the peak of the measured step is held against it.

    Raises:
        PlanError: the plan is missing, or needs more memory than this device or the budget has.
        Interrupted: `signals` said so; what was trained is saved.
        DeviceFullError: it does not fit, and `hardware.on_out_of_memory` is stop or nothing is left to halve.
    """
    params = with_ranks(planned_params(written, [variant]), variant, ranks)
    device = rank_device(params, ranks)
    # A plan is for one of the ranks that the params name; on a CPU those of a machine share its memory.
    planned_bytes = planned_memory_bytes(written, variant) if ranks.count == written.training.ranks else None
    check_memory(planned_bytes, device, memory_budget_bytes, sharing=ranks.local_count)
    use_deterministic_kernels(device)
    if device.type == "cpu" and params.hardware.on_out_of_memory == "stop":
        keep_freed_memory()  # else what a failed step gave back could not be used in other sizes
    check_device_rules(params.model, params.variants[variant], device)
    compile_cache = use_compile_cache(project_root() / params.hardware.compile_cache)
    sequences = _train_sequences(params)
    fingerprint = train_fingerprint(params, variant, device.type, TOKENS_META)
    with (
        joined_ranks(params, variant, device, ranks),
        shared_work_folder(work_root(), variant, fingerprint, ranks, fresh=fresh) as folder,
    ):
        store = CheckpointStore(folder, params.checkpoints.keep, ranks)
        planned = params.variants[variant].micro_batch_size
        run: TrainRun | None = TrainRun(
            params, variant, device, fingerprint, store, planned, compile_cache, memory_budget_bytes, ranks
        )
        while run is not None:
            run = _train_or_halve(run, sequences, signals)


def _train_or_halve(
    run: TrainRun, sequences: PackedSequences | PaddedSequences, signals: StopSignals
) -> TrainRun | None:
    """Train to the end; or, where memory runs out, the run to try next."""
    try:
        return _train_from_checkpoint(run, sequences, signals)
    except (RuntimeError, MemoryError) as error:
        failure = failed_allocation(error, run.device)
        if isinstance(error, OverBudgetError):
            failure = FailedAllocation(error.over_bytes, error.budget_bytes)
        if failure is None:
            raise
        problem = out_of_memory_message(run.params, run.variant, run.device, failure)
    finally:
        # Nobody may read or lock the folder while it is written. Where other ranks may be lost the wait is
        # short: this process ends then.
        run.store.wait(_LOST_RANKS_SECONDS if run.ranks.has_others else None)
    # Only now, with its traceback gone, is the memory of the failed step free.
    smaller = next_smaller_micro_batch(run.techniques, run.params.training.global_batch_size)
    if (
        run.params.hardware.on_out_of_memory == "stop"
        or smaller is None
        or run.techniques.optimizer_in_backward
    ):
        raise DeviceFullError(problem)
    say(f"{run.variant}: {problem}; going on from the last checkpoint with micro_batch_size {smaller}")
    if run.techniques.compile != "off":
        torch._dynamo.reset()
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    store = CheckpointStore(run.store.folder, run.store.keep, run.ranks)  # from 0: the record has the rest
    return replace(run.with_micro_batch(smaller), store=store)


def _train_from_checkpoint(
    run: TrainRun, sequences: PackedSequences | PaddedSequences, signals: StopSignals
) -> TrainRun | None:
    """Train to the end; or, where an earlier start ran out of memory, the run with its micro-batch."""
    params, store, ranks = run.params, run.store, run.ranks
    matmul_setting = set_float32_matmul(run.techniques.precision, run.device)
    state, policy = initial_state(params, run.variant, run.device, ranks)
    record, resumed = restored_record(run, state)
    if record.published is not None:
        if not ranks.from_first(ranks.is_first and is_forced(run.variant, record.published)):
            check_budget(run, record.peak)
            if ranks.is_first:
                publish_again(run, record.published, TOKENS_META)
            return None
        if ranks.is_first:
            store.remove(store.checkpoints())
        state, policy = initial_state(params, run.variant, run.device, ranks)
        record, resumed = TrainRecord(run.planned_micro_batch_size), False
    if record.micro_batch_size > run.techniques.micro_batch_size:
        halved = {"after_step": state.step, "micro_batch_size": run.techniques.micro_batch_size}
        record.halved.append(halved)
        record = replace(record, micro_batch_size=halved["micro_batch_size"], peak=None)
    elif record.micro_batch_size < run.techniques.micro_batch_size:
        return run.with_micro_batch(record.micro_batch_size)
    record.start(state.step, ranks.count, run.techniques.parallelism)

    apply_recompute(state.model, run.techniques)
    apply_compile(state.model, run.techniques)
    parallel = Parallel(state.model, run.techniques, ranks)
    device_facts = asdict(describe_device(run.device)) | {
        "float32_matmul_precision": matmul_setting,
        "attention_kernel": attention_kernel(run.device, policy.autocast_dtype or policy.weights_dtype),
    }
    with ExitStack() as open_:
        tracker = progress = None
        if ranks.is_first:
            tracker = open_.enter_context(run_tracker(run, device_facts, TOKENS_META, resumed=resumed))
            bar = TrainingProgress(run.variant, params.training.num_steps, state.step)
            progress = open_.enter_context(bar)
        compilation = open_.enter_context(CompileWatch(enabled=run.techniques.compile != "off"))
        measurements = record.measurements(compilation)
        steps = steps_with_checkpoints(run, state, parallel, sequences, policy, record, measurements, signals)
        with compiling(run.compile_cache) if run.techniques.compile != "off" else nullcontext():
            first_row = next(steps, None)
        with signals.deferred():
            for row in chain([first_row], steps):
                if row is not None and tracker is not None and progress is not None:
                    track(tracker, row, measurements)
                    progress.show(row, measurements)
            measurements.peak = highest(ranks.gather(measurements.peak))
            stop_signal = any_requested(signals, ranks)
            # Not before the first step, which need not wait for it.
            ceiling = measure_matmul_flops_per_second(run.device, run.techniques.precision)
            figures = record.figures(params, measurements, store, ceiling)
            if tracker is not None:
                tracker.log_summary({key: figures[key] for key in SUMMARY})
            image = container_image()
            measured = {
                "variant": run.variant,
                "device": device_facts,
                "ranks": ranks.count,
                "image": image.identity if image else None,
            } | figures
            facts = training_facts(run, state, record)
            texts = texts_to_publish(facts, measured, record.rows, measurements.timer)
            keep_and_publish(run, state, record, measurements, texts)
    if ranks.is_first:
        print_end(run, state, record, figures)
    if stop_signal is not None:
        # It is all published. But who sent the signal wants no next stage to begin.
        raise TrainingStopped(stop_signal, "when it was complete; `dvc repro` takes it from there")
    return None


def _train_sequences(params: Params) -> PackedSequences | PaddedSequences:
    split = TokenShards.open(TOKENS, "train")
    if split.vocab_size != params.tokenizer.vocab_size:
        raise TokenFileError(
            f"{split.path} was made for tokenizer.vocab_size {split.vocab_size}, params.yaml says "
            f"{params.tokenizer.vocab_size}; run `dvc repro tokenize`"
        )
    if not TOKENS_META.exists():
        raise TokenFileError(f"{TOKENS_META}: no such file; run `dvc repro tokenize`")
    return make_sequences(split, params.training.sequences, params.training.sequence_length)


if __name__ == "__main__":
    sys.exit(main())
