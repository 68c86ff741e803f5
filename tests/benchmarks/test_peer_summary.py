import pytest

from benchmarks.peer_summary import Spread
from stages.measure.flops import model_flops_per_token
from stages.params import ModelParams
from tests.benchmarks.peer_runs_made import PARAMETERS, STANDING, result, rows, runs

from benchmarks.peer_works import WORKS  # isort: skip


def test_ratios_are_of_the_same_round_and_the_same_column() -> None:
    own, own_switched, peer, peer_switched = rows(
        [
            runs("frugal", False, [result(120), result(60), result(150)]),
            runs("frugal", True, [result(200), result(100), result(300)]),
            runs("trainer", False, [result(100), result(50), result(50)]),
            runs("trainer", True, [result(100), result(100), result(100)]),
        ]
    )
    assert peer.speed_ratio == Spread(1.2, 1.2, 3.0)
    assert peer_switched.speed_ratio == Spread(2.0, 1.0, 3.0)
    assert own.speed_ratio is own_switched.speed_ratio is None
    assert own.tokens_per_second == Spread(120, 60, 150)


def test_memory_beyond_is_the_median_peak_less_what_must_stand() -> None:
    mib = 2**20
    own, peer = rows(
        [
            runs("frugal", True, [result(peak_bytes=STANDING + mib)] * 2),
            runs("trainer", True, [result(peak_bytes=STANDING + size * mib) for size in (3, 4, 50)]),
        ]
    )
    assert own.beyond_bytes == mib
    assert peer.beyond_bytes == 4 * mib
    assert peer.beyond_ratio == pytest.approx(1 / 4)
    assert peer.peak_ratio == pytest.approx((STANDING + mib) / (STANDING + 4 * mib))


def test_share_of_the_ceiling_counts_model_flops() -> None:
    work = WORKS["W"]
    flops = model_flops_per_token(ModelParams(**work.model), work.vocab_size, work.sequence_length)
    own, peer = rows(
        [
            runs("frugal", False, [result(100, ceiling_flops_per_second=flops * 400.0)]),
            runs("trainer", False, [result(50)]),
        ]
    )
    assert own.ceiling_share == pytest.approx(0.25)
    assert peer.ceiling_share == pytest.approx(0.125)


def test_compile_seconds_are_of_the_first_round_and_of_compiled_techniques() -> None:
    cold, warm = result(warmup_seconds=[50.48, 20.48]), result(warmup_seconds=[21.0])
    [compiled] = rows([runs("frugal", False, [cold, warm])], technique="amp_compile")
    assert compiled.compile_seconds == pytest.approx(30.0)
    [eager] = rows([runs("frugal", False, [cold, warm])], technique="amp")
    assert eager.compile_seconds is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"parameters": PARAMETERS + 1}, "has 1,000,001 parameters and the work has 1,000,000"),
        ({"losses": [9.0, 8.5, 8.0]}, "its loss of step 3 is 8.0000 and frugal's 8.2500"),
        ({"losses": [9.0, 8.5, float("nan")]}, "its loss of step 3 is nan and frugal's 8.2500"),
        (
            {"versions": {"python": "3.11.7", "torch": "2.12.0"}},
            "runs on torch 2.12.0 and frugal on 2.13.0",
        ),
    ],
)
def test_who_did_other_work_has_no_figures(other: dict, reason: str) -> None:
    own, peer = rows([runs("frugal", False, [result()]), runs("litgpt", False, [result(), result(**other)])])
    assert own.failure is None
    assert peer.failure == reason
    assert peer.tokens_per_second is peer.speed_ratio is None


def test_rounding_is_no_other_work_and_is_told() -> None:
    _, peer = rows(
        [
            runs("frugal", False, [result(losses=[9.0, 8.5])]),
            runs("litgpt", False, [result(losses=[9.0, 8.5085])]),
        ]
    )
    assert peer.failure is None
    assert peer.loss_difference == pytest.approx(0.001)


def test_fp32_is_held_to_less_than_16_bits() -> None:
    pair = [
        runs("frugal", False, [result(losses=[9.0, 8.5])]),
        runs("litgpt", False, [result(losses=[9.0, 8.5085])]),
    ]
    assert "its loss of step 2" in rows(pair, technique="fp32")[1].failure


def test_without_this_project_there_are_figures_and_no_ratio() -> None:
    broken, peer = rows(
        [runs("frugal", False, [], failure="out of memory"), runs("litgpt", False, [result()])]
    )
    assert broken.failure == "out of memory"
    assert peer.tokens_per_second == Spread(100, 100, 100)
    assert peer.speed_ratio is peer.beyond_ratio is None
