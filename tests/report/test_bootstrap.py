import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.report.bootstrap import BootstrapError, DocumentLosses, paired_bootstrap


def _losses(variant: str, sizes: np.ndarray, nats: np.ndarray) -> DocumentLosses:
    return DocumentLosses(variant, tuple(str(i) for i in range(len(sizes))), sizes, nats)


def _pair(count: int, seed: int = 0, shift: float = 0.01) -> tuple[DocumentLosses, DocumentLosses]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(500, 20_000, count)
    nats = sizes * rng.normal(1.1, 0.1, count)
    return _losses("a", sizes, nats), _losses("b", sizes, nats + sizes * rng.normal(shift, 0.02, count))


def test_interval_agrees_with_scipy() -> None:
    a, b = _pair(60)

    def statistic(difference: np.ndarray, sizes: np.ndarray, axis: int = -1) -> np.ndarray:
        return difference.sum(axis=axis) / (math.log(2) * sizes.sum(axis=axis))

    oracle = scipy.stats.bootstrap(
        (b.nats - a.nats, a.bytes), statistic, paired=True, vectorized=True, n_resamples=20_000,
        method="percentile", rng=np.random.default_rng(5),
    )  # fmt: skip
    found = paired_bootstrap(a, b, samples=20_000, seed=1)
    assert found.ci95 is not None
    width = oracle.confidence_interval.high - oracle.confidence_interval.low
    assert found.ci95 == pytest.approx(tuple(oracle.confidence_interval), abs=0.03 * width)
    assert found.delta_bits_per_byte == pytest.approx(b.bits_per_byte - a.bits_per_byte)


def test_interval_of_equal_documents_is_the_normal_one() -> None:
    rng = np.random.default_rng(3)
    sizes = np.full(400, 1000)
    nats = rng.normal(1100, 100, 400)
    difference = rng.normal(2.0, 15.0, 400)
    found = paired_bootstrap(
        _losses("a", sizes, nats), _losses("b", sizes, nats + difference), samples=20_000, seed=2
    )
    per_document = difference / (math.log(2) * 1000)
    error = 1.96 * per_document.std() / math.sqrt(400)
    mean = per_document.mean()
    assert found.delta_bits_per_byte == pytest.approx(mean)
    assert found.ci95 == pytest.approx((mean - error, mean + error), abs=0.04 * error)


def test_pairing_ignores_how_hard_the_documents_are() -> None:
    sizes = np.full(30, 1000)
    nats = np.linspace(100, 5000, 30)
    found = paired_bootstrap(_losses("a", sizes, nats), _losses("b", sizes, nats + 10), samples=500, seed=0)
    expected = 10 / (1000 * math.log(2))
    assert found.ci95 == pytest.approx((expected, expected))


@settings(max_examples=25, deadline=None)
@given(count=st.integers(2, 40), seed=st.integers(0, 2**32), at_once=st.integers(1, 500))
def test_memory_bound_does_not_change_the_result(count: int, seed: int, at_once: int) -> None:
    a, b = _pair(count, seed)
    whole = paired_bootstrap(a, b, samples=150, seed=seed)
    parts = paired_bootstrap(a, b, samples=150, seed=seed, draws_at_once=at_once)
    assert parts == whole


@settings(max_examples=25, deadline=None)
@given(count=st.integers(2, 40), seed=st.integers(0, 2**32))
def test_exchanging_the_variants_mirrors_the_interval(count: int, seed: int) -> None:
    a, b = _pair(count, seed)
    forth, back = paired_bootstrap(a, b, samples=200, seed=7), paired_bootstrap(b, a, samples=200, seed=7)
    assert forth.ci95 is not None and back.ci95 is not None
    assert forth.ci95 == pytest.approx((-back.ci95[1], -back.ci95[0]))
    assert forth.ci95[0] <= forth.ci95[1]


def test_single_document_has_no_interval() -> None:
    a, b = _pair(1)
    assert paired_bootstrap(a, b, samples=100, seed=0).ci95 is None


def test_other_documents_are_refused() -> None:
    a, b = _pair(5)
    shorter = DocumentLosses("b", b.documents[:4], b.bytes[:4], b.nats[:4])
    with pytest.raises(
        BootstrapError, match=r"5 and 4 validation documents.*dvc repro evaluate@a evaluate@b"
    ):
        paired_bootstrap(a, shorter, samples=100, seed=0)
    renamed = DocumentLosses("b", (*b.documents[:4], "other"), b.bytes, b.nats)
    with pytest.raises(BootstrapError, match="number 5 is '4' for one and 'other' for the other"):
        paired_bootstrap(a, renamed, samples=100, seed=0)
    longer = DocumentLosses("b", b.documents, b.bytes + np.array([0, 0, 1, 0, 0]), b.nats)
    with pytest.raises(
        BootstrapError, match=f"document '2' has {b.bytes[2]} bytes for one and {b.bytes[2] + 1}"
    ):
        paired_bootstrap(a, longer, samples=100, seed=0)
