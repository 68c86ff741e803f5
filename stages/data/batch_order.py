"""Which sequences make up the global batch of a step: a pure function of seed and step.

There is no state to save: a run that resumes at step n asks for step n. Nor does the number of ranks enter:
a rank takes its part of the global batch that all ranks have (`rank_part`).
"""

import numpy as np

from stages.data.permutation import permuted
from stages.data.sequences import FILLER

LARGEST_SHUFFLE = 2**24
"""Up to so many sequences the order of an epoch is drawn as a whole, in 128 MiB; of more it is computed place
by place."""


class BatchOrder:
    """Every epoch is another permutation of all sequences, cut into global batches.

    The last batch of an epoch is filled up with FILLER (-1), so that all batches have one shape and
    an epoch sees every sequence exactly once.
    """

    def __init__(self, seed: int, global_batch_size: int, num_sequences: int):
        if num_sequences < 1 or global_batch_size < 1:
            raise ValueError(
                f"{num_sequences} sequences in batches of {global_batch_size}: both must be 1 or more"
            )
        self.global_batch_size = global_batch_size
        self.num_sequences = num_sequences
        self.steps_per_epoch = -(-num_sequences // global_batch_size)
        self._seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def indices(self, step: int) -> np.ndarray:
        """int64 [global_batch_size]: sequence indices, or FILLER. Steps count from 0."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        start = batch * self.global_batch_size
        places = np.arange(start, min(start + self.global_batch_size, self.num_sequences))
        indices = np.full(self.global_batch_size, FILLER, np.int64)
        # (seed, epoch) through SeedSequence: the streams of two epochs are independent.
        key = np.random.SeedSequence((self._seed, epoch))
        if self.num_sequences > LARGEST_SHUFFLE:
            indices[: len(places)] = permuted(places, self.num_sequences, key)
            return indices
        if epoch != self._epoch:
            self._permutation = np.random.Generator(np.random.Philox(key)).permutation(self.num_sequences)
            self._epoch = epoch
        indices[: len(places)] = self._permutation[places]
        return indices


def rank_part(indices: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """What rank `rank` of `ranks`, counted from 0, reads of a global batch.

    The parts are disjoint, of one size, and in the order of the ranks they are the global batch. At the end
    of an epoch a part may be all FILLER: losses are to be divided by the target tokens of all ranks together.

    Args:
        indices: int64 [global batch size], as BatchOrder.indices gives them to every rank.

    Raises:
        ValueError: the global batch does not divide by `ranks`, or there is no such rank.
    """
    size, rest = divmod(len(indices), ranks)
    if rest or not 0 <= rank < ranks:
        raise ValueError(
            f"rank {rank} of {ranks} with a global batch of {len(indices)}: it must divide evenly"
        )
    return indices[rank * size : (rank + 1) * size]
