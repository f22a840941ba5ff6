"""How does DeepSpeed cut a pipeline's layers into stages?

PipelineModule takes no list of stages (deepspeed/runtime/pipe/module.py, _partition_layers), and
Megatron-DeepSpeed asks it for `type:transformer` (megatron/model/gpt_model.py, GPTModelPipe): every
entry of the model counts 1 where it is a transformer layer and 0 otherwise, and the entries are cut
so that the stages' counts lie close together. With w the counts, S their prefix sums and

    spread(i, j) = least over k < i of
                   max(top(k, j-1), S_i - S_k) - min(low(k, j-1), S_i - S_k)

where top and low are those of the chosen cut of the first i entries into j stages, and of equal
spreads the last k is taken (DeepSpeed 0.19.6, deepspeed/runtime/utils.py, partition_balanced). It
need not be the least spread of all, so nothing but the recurrence itself says what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

BEFORE, TIED_END, FORMAT_END = 2, 2, 1
"""Entries of GPTModelPipe without weight: a cast and the embedding before the layers; norm and head
behind them, and one more cast where the precision is not float32."""


@lru_cache(maxsize=64)
def transformer_layers(num_layers: int, stages: int, *, mixed: bool) -> tuple[int, ...]:
    """Transformer layers of every stage of Megatron-DeepSpeed; `mixed`: not float32."""
    behind = TIED_END + (FORMAT_END if mixed else 0)
    counts = [0] * BEFORE + [1] * num_layers + [0] * behind
    cuts = balanced_cuts(counts, stages)
    return tuple(sum(counts[start:stop]) for start, stop in pairwise(cuts))


def balanced_cuts(weights: Sequence[int], stages: int) -> tuple[int, ...]:
    """First entry of every stage, and the number of all entries.

    With no more entries than stages each of the first stages has one.
    """
    total = len(weights)
    if total <= stages:
        return tuple(min(stage, total) for stage in range(stages + 1))
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=np.float64))])
    top = np.full((stages + 1, total + 1), np.inf)
    low = np.full((stages + 1, total + 1), np.inf)
    last = np.zeros((stages + 1, total + 1), dtype=np.int64)
    top[0, 0] = 0.0
    for count in range(1, stages + 1):
        for stop in range(count, total + 1):
            own = sums[stop] - sums[:stop]
            high = np.maximum(top[count - 1, :stop], own)
            small = np.minimum(low[count - 1, :stop], own)
            spread = high - small
            at = stop - 1 - int(np.argmin(spread[::-1]))
            top[count, stop], low[count, stop], last[count, stop] = high[at], small[at], at
    cuts = [total]
    for count in range(stages, 0, -1):
        cuts.append(int(last[count, cuts[-1]]))
    return tuple(reversed(cuts))
