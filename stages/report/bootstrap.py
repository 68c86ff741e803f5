"""How far two variants' losses are apart, and how sure the validation documents let us be.

A paired bootstrap: documents are drawn with replacement, the same draw for both variants, and the
difference is computed anew for each draw. Pairing removes what makes a document easy or hard for
every model. Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13 (percentile
interval); Koehn 2004, "Statistical Significance Tests for Machine Translation Evaluation" (paired
over test documents).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DRAWS_AT_ONCE = 2**19
"""Indices drawn in one go: 4 MiB each for them and for what they pick, whatever the number of documents."""


class BootstrapError(ValueError):
    """The two variants were not scored on the same documents."""


@dataclass(frozen=True)
class DocumentLosses:
    """What one variant lost on each validation document; the three have one entry per document."""

    variant: str
    documents: tuple[str, ...]
    bytes: NDArray[np.int64]
    """UTF-8 bytes of each document."""
    nats: NDArray[np.float64]
    """Cross-entropy summed over each document's tokens."""

    @property
    def bits_per_byte(self) -> float:
        return float(self.nats.sum() / (math.log(2) * self.bytes.sum()))


@dataclass(frozen=True)
class PairedDifference:
    """The other variant minus the reference: above zero is worse than the reference."""

    delta_bits_per_byte: float
    ci95: tuple[float, float] | None
    """95 % percentile interval; None for a single document, where no draw differs from another."""


def paired_bootstrap(
    reference: DocumentLosses,
    other: DocumentLosses,
    *,
    samples: int,
    seed: int,
    draws_at_once: int = _DRAWS_AT_ONCE,
) -> PairedDifference:
    """Difference in bits per byte, (sum nats_other - sum nats_reference) / (ln 2 * sum bytes).

    Args:
        samples: draws of the documents; 10,000 leave a few percent of noise in the interval's ends.
        seed: of the draws; the same seed draws the same documents for every pair of variants.
        draws_at_once: bounds the memory; the result does not depend on it.

    Raises:
        BootstrapError: the variants differ in their documents or in a document's bytes.
    """
    _check_same_documents(reference, other)
    count = len(reference.documents)
    nats_difference = other.nats - reference.nats
    delta = float(nats_difference.sum() / (math.log(2) * reference.bytes.sum()))
    if count < 2:
        return PairedDifference(delta, None)

    rng = np.random.default_rng(seed)
    resampled_nats = np.empty(samples)
    resampled_bytes = np.empty(samples)
    samples_at_once = max(1, draws_at_once // count)
    for start in range(0, samples, samples_at_once):
        stop = min(start + samples_at_once, samples)
        drawn = rng.integers(0, count, size=(stop - start, count))
        resampled_nats[start:stop] = nats_difference[drawn].sum(axis=1)
        resampled_bytes[start:stop] = reference.bytes[drawn].sum(axis=1)
    low, high = np.quantile(resampled_nats / (math.log(2) * resampled_bytes), [0.025, 0.975])
    return PairedDifference(delta, (float(low), float(high)))


def _check_same_documents(reference: DocumentLosses, other: DocumentLosses) -> None:
    repair = f"run `dvc repro evaluate@{reference.variant} evaluate@{other.variant}`"
    names = f"{reference.variant} and {other.variant}"
    if len(reference.documents) != len(other.documents):
        raise BootstrapError(
            f"{names} were evaluated on {len(reference.documents)} and {len(other.documents)} "
            f"validation documents, which must be the same ones; {repair}"
        )
    for place, (a, b) in enumerate(zip(reference.documents, other.documents, strict=True), start=1):
        if a != b:
            raise BootstrapError(
                f"{names} were evaluated on other validation documents (number {place} is {a!r} for "
                f"one and {b!r} for the other); {repair}"
            )
    different = np.flatnonzero(reference.bytes != other.bytes)
    if different.size:
        place = int(different[0])
        raise BootstrapError(
            f"{names} were evaluated on other text (document {reference.documents[place]!r} has "
            f"{reference.bytes[place]} bytes for one and {other.bytes[place]} for the other); {repair}"
        )
