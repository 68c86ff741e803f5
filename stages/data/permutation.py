"""A permutation of 0 ... n - 1 that is never in memory: each place is computed by itself.

A Feistel network over the smallest even number of bits that n fits into (Luby and Rackoff 1988): each round
replaces (left, right) by (right, left xor f(right)), which can be undone whatever f is, so that no two places
get one value. Where a value is n or more it goes through the network again until it is not (cycle walking,
Black and Rogaway 2002): that keeps it a permutation, and fewer than 4 passes a place are expected.
"""

import numpy as np

_ROUNDS = 6
# splitmix64's mixing of 64 bits (Steele, Lea and Flood 2014).
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def permuted(places: np.ndarray, n: int, key: np.random.SeedSequence) -> np.ndarray:
    """int64, as many as `places`: what stands at these places of the permutation that `key` chooses.

    Args:
        places: integers from 0 to n - 1.
    """
    half_bits = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    round_keys = key.generate_state(_ROUNDS, np.uint64)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        values[outside] = _network(values[outside], half_bits, round_keys)
        outside = values >= n
    return values.astype(np.int64)


def _network(values: np.ndarray, half_bits: np.uint64, round_keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mixed(right ^ round_key) & mask)
    return (left << half_bits) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))
