"""One training by 1, 2 and 4 ranks is one training: the same tokens, losses and gradients."""

import math
from pathlib import Path

import pytest

from stages.data.sequences import make_sequences
from stages.data.token_files import TokenFile
from stages.measure.compilation import CompileWatch
from stages.measure.throughput import StepTimer
from stages.training.checkpoint import MODEL, load_checkpoint, save_checkpoint
from stages.training.loop import Measurements, training_steps
from stages.training.parallel import Parallel
from stages.training.ranks import Ranks, RanksError, ranks_of_environment
from stages.training.state import initial_state
from tests.training.rank_runs import Case, curves, start_ranks
from tests.training.small_run import CPU, small_params, token_file

# Batches of documents of 3 to 40 tokens: every rank has another number of targets, and at an epoch's end some
# have none at all.
RAGGED = {"sequences": "padded"}
CASES = {
    "ddp": Case({"micro_batch_size": 2}),
    "ddp, ragged": Case({"micro_batch_size": 1, "recompute": "every_block"}, RAGGED),
    "ddp, bf16": Case({"micro_batch_size": 1, "precision": "amp_bf16", "loss": "chunked"}),
    "ddp, pure bf16": Case({"micro_batch_size": 2, "precision": "bf16"}),
    "ddp, 8 bits": Case({"micro_batch_size": 2, "optimizer": "adamw_8bit"}),
    "ddp, muon": Case({"micro_batch_size": 2, "optimizer": "muon"}),
    "fsdp": Case({"micro_batch_size": 2, "parallelism": "fsdp"}),
    "fsdp, ragged": Case({"micro_batch_size": 1, "parallelism": "fsdp", "recompute": "every_block"}, RAGGED),
    "fsdp, bf16": Case(
        {"micro_batch_size": 1, "parallelism": "fsdp", "precision": "amp_bf16", "loss": "chunked"}
    ),
    "fsdp, tied": Case(
        {"micro_batch_size": 2, "parallelism": "fsdp", "recompute": "selective"},
        {"model": {"tie_word_embeddings": True}},
    ),
    "fsdp offloaded": Case({"micro_batch_size": 2, "parallelism": "fsdp_cpu_offload"}),
    "ddp, compiled": Case({"micro_batch_size": 2, "compile": "blocks"}),
    "fsdp, compiled": Case(
        {"micro_batch_size": 2, "parallelism": "fsdp", "compile": "blocks", "recompute": "every_block"}
    ),
    "ddp, fp16": Case({"micro_batch_size": 1, "precision": "amp_fp16"}),
    "fsdp, fp16": Case({"micro_batch_size": 1, "parallelism": "fsdp", "precision": "amp_fp16"}),
}


def alone(case: Case) -> Case:
    """The same on one rank, with all the techniques that must not matter."""
    techniques = case.techniques | {"parallelism": "ddp", "micro_batch_size": 8, "recompute": "none"}
    techniques |= {"compile": "off"}
    if case.techniques.get("precision") == "amp_fp16":
        # A sum over more tokens overflows at a smaller scale.
        techniques |= {"micro_batch_size": case.techniques["micro_batch_size"]}
    return Case(techniques, case.training)


def tolerance_of(case: Case) -> float:
    """Relative. Sums are in another order; of what is rounded to 16 bits a small difference makes a larger
    one, which grows from step to step."""
    rounds = case.techniques.get("precision", "fp32") != "fp32" or case.techniques.get("optimizer") == "muon"
    return 4e-3 if rounds else 4e-6


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, float, float]]]:
    found = curves(tmp_path_factory.mktemp("one"), 1, [alone(case) for case in CASES.values()])
    return dict(zip(CASES, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_curve_does_not_depend_on_the_number_of_ranks(
    tmp_path: Path, of_one: dict[str, list[tuple[int, float, float]]], ranks: int
) -> None:
    # Of 4 ranks each has 2 sequences of a global batch.
    for name, found in zip(CASES, curves(tmp_path, ranks, list(CASES.values())), strict=True):
        expected = of_one[name]
        assert len(found) == 20
        assert [row[0] for row in found] == [row[0] for row in expected], name
        tolerance = tolerance_of(CASES[name])
        overflows = sum(not math.isfinite(row[2]) for row in found)
        assert (overflows > 0) == (CASES[name].techniques.get("precision") == "amp_fp16"), name
        for (_, loss, norm), (_, expected_loss, expected_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=tolerance), name
            assert norm == pytest.approx(expected_norm, rel=5 * tolerance, nan_ok=True), name


@pytest.mark.slow
def test_three_ranks_that_were_stopped_end_in_the_same_bits(tmp_path: Path) -> None:
    """More than two add up in an order that follows from DDP's buckets, of which this model has several."""
    token_file(tmp_path)
    start_ranks(_stop_and_go_on, 3, tmp_path)
    assert (tmp_path / "same").read_text() == "True"


def _stop_and_go_on(ranks: Ranks, folder: Path) -> None:
    model = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
    training = {"global_batch_size": 12, "token_budget": 6 * 12 * 16, "model": model}
    params = small_params({"micro_batch_size": 2}, ranks=3, **training)

    def run(steps: int, start: Path | None, end: Path) -> None:
        state, policy = initial_state(params, "v", CPU, ranks)
        if start is not None:
            load_checkpoint(state, start)
        parallel = Parallel(state.model, params.variants["v"], ranks)
        sequences = make_sequences(TokenFile.open(folder / "train.safetensors"), "packed", 16)
        measured = Measurements(StepTimer(), CompileWatch(enabled=False))
        for _ in training_steps(state, sequences, params, "v", policy, measured, parallel=parallel):
            if state.step == steps:
                break
        end.mkdir()
        save_checkpoint(state, end)

    mine = folder / str(ranks.rank)
    mine.mkdir()
    run(6, None, mine / "whole")
    run(3, None, mine / "stopped")
    run(6, mine / "stopped", mine / "gone_on")
    same = [(mine / name / MODEL).read_bytes() for name in ("whole", "gone_on")]
    if ranks.is_first:
        (folder / "same").write_text(str(same[0] == same[1]))


def test_a_process_without_torchrun_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_of_environment() is None


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RanksError, match=r"WORLD_SIZE.* torchrun"):
        ranks_of_environment()
