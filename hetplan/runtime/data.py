"""Training data of the reference trainer: synthetic token sequences that can be learnt.

The data is synthetic: a Markov chain over the vocabulary in which each token is followed by one of
`SUCCESSORS` others with fixed probabilities. A model that learns the table reaches the chain's
entropy (about 1.2 nats per token), one that knows nothing has ln(vocabulary); a
falling loss therefore shows that training works, and nothing about language.

Sample n is the same whatever the plan: it is drawn from (seed, n) alone. Step t of a job uses
samples t * G to (t + 1) * G of its global batch G; within it microbatch i of data-parallel rank d
is the `microbatch_size` b samples from (i * dp + d) * b on, so that the ranks' microbatches i
together are the consecutive samples i * dp * b to (i + 1) * dp * b. Of several pipelines each has
a run of the step's samples, in their order; where the ranks of a stage have microbatches of
different sizes, they share each of the pipeline's in the order of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Skewed, so that there is more to learn than which tokens may follow: an even choice among four
# would have an entropy of ln 4 = 1.39.
SUCCESSORS = (0.5, 0.25, 0.15, 0.10)

# Independent streams of one seed.
_TABLE_STREAM, _SAMPLE_STREAM = 0, 1


@dataclass(frozen=True, slots=True)
class MarkovTokens:
    """Samples of one seed over one vocabulary."""

    table: NDArray[np.int64]
    """Successors [vocabulary, len(SUCCESSORS)]."""
    seed: int

    @classmethod
    def of(cls, vocab_size: int, seed: int) -> MarkovTokens:
        """The chain of this seed."""
        draw = np.random.default_rng([seed, _TABLE_STREAM])
        return cls(draw.integers(0, vocab_size, size=(vocab_size, len(SUCCESSORS))), seed)

    def samples(self, numbers: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Tokens [len(numbers), length] of the samples of these numbers."""
        uniform = np.stack(
            [
                np.random.default_rng([self.seed, _SAMPLE_STREAM, int(number)]).random(length)
                for number in numbers
            ]
        )
        branch = np.searchsorted(np.cumsum(SUCCESSORS)[:-1], uniform, side="right")
        tokens = np.empty(uniform.shape, dtype=np.int64)
        tokens[:, 0] = (uniform[:, 0] * len(self.table)).astype(np.int64)
        for place in range(1, length):
            tokens[:, place] = self.table[tokens[:, place - 1], branch[:, place]]
        return tokens


def sample_numbers(
    step: int,
    *,
    global_batch_size: int,
    microbatch_size: int,
    dp: int,
    dp_index: int,
) -> NDArray[np.int64]:
    """Samples that one data-parallel rank trains on in this step, microbatch by microbatch."""
    return block_numbers(
        step * global_batch_size + dp_index * microbatch_size,
        count=global_batch_size // (microbatch_size * dp),
        apart=dp * microbatch_size,
        size=microbatch_size,
    )


def block_numbers(first: int, *, count: int, apart: int, size: int) -> NDArray[np.int64]:
    """`count` runs of `size` samples, whose first ones are `apart` samples from each other."""
    blocks = (first + np.arange(count) * apart)[:, None]
    return (blocks + np.arange(size)).reshape(-1)
