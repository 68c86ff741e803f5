"""Which sequences make up the global batch of a step: a pure function of seed and step.

There is no state to save: a run that resumes at step n asks for step n.
"""

import numpy as np

from stages.data.sequences import FILLER


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
        if epoch != self._epoch:
            # (seed, epoch) through SeedSequence: the streams of two epochs are independent.
            generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, epoch))))
            self._permutation = generator.permutation(self.num_sequences)
            self._epoch = epoch
        start = batch * self.global_batch_size
        indices = np.full(self.global_batch_size, FILLER, np.int64)
        chosen = self._permutation[start : start + self.global_batch_size]
        indices[: len(chosen)] = chosen
        return indices
