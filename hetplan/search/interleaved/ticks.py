"""When does every stage of Megatron-LM's interleaved pipeline end: a replay in lock-step.

Megatron-LM's batched exchange (`hetplan.cost.replay.programs`, Exchange.MEGATRON) ties all stages
together. P stages, v chunks, m microbatches (a multiple of P, at least 2 P), N = m v. Stage s runs
w_s = 2 (P - 1 - s) + (v - 1) P forward passes, then pairs of a forward and a backward pass, then
w_s backward passes. After each of these N + w_s turns it exchanges, and whatever two stages
exchange they post in the same tick t = s + turn:

    turn t - s of stage s    forward pass k = t - s        where 0 <= k < N
                             backward pass y = k - w_s     where 0 <= y < N
    exchange of tick t       F_k to the stage below, B_y to the stage above; from the last stage to
                             the first and back where a next chunk follows

so a tick is one sweep over the stages, and a step N + 3 P + (v - 1) P sweeps or so. The general
replay (`hetplan.cost.replay.ends`) gives the same ends to the last bit or two; this one takes a
twentieth of its time.
"""

from __future__ import annotations

import numpy as np

from hetplan.kernels import kernel
from hetplan.search.families.space import Floats


@kernel
def lockstep_applies(stages: int, microbatches: int) -> bool:
    """Whether this order of exchanges is the one above, Megatron-LM's sends provided."""
    return stages >= 3 and microbatches % stages == 0 and microbatches >= 2 * stages


@kernel
def chunk_at(place: int, stages: int, chunks: int) -> int:
    """Chunk of the forward pass at this place of a stage's order; any place, also before 0.

    Of a backward pass it is v - 1 less this.
    """
    return (place // stages) % chunks


@kernel
def lockstep_ends(forward: Floats, backward: Floats, hops: Floats, microbatches: int) -> Floats:
    """End of every stage, seconds. forward and backward are [P, v].

    hops [4, P]: send of an activation, send of a gradient, latency, wait of rendezvous sends; hop s
    leads from stage s to s + 1, the last one back to stage 0. `lockstep_applies` must hold.
    """
    stages, chunks = forward.shape
    total = microbatches * chunks
    last = stages - 1
    base = 2 * last + (chunks - 1) * stages
    posted, now = np.zeros(stages), np.zeros(stages)
    for t in range(total + base + 1):
        for s in range(stages):
            k = t - s
            y = t + s - base
            spent = now[s]
            if 0 <= k < total:
                spent += forward[s, (k // stages) % chunks]
            if 0 <= y < total:
                spent += backward[s, chunks - 1 - (y // stages) % chunks]
            posted[s] = now[s] = spent
        for s in range(stages):
            below = s + 1 if s < last else 0
            k = t - s
            # Activations downwards; the last chunk of the last stage sends none.
            if 0 <= k < total and (s < last or (k // stages) % chunks < chunks - 1):
                left = max(posted[s], posted[below] + hops[3, s]) + hops[0, s]
                now[s] = max(now[s], left)
                now[below] = max(now[below], left + hops[2, s])
            # Gradients upwards, over the same hop; the first chunk of the first stage sends none.
            y = t + below - base
            if 0 <= y < total and (s < last or (y // stages) % chunks < chunks - 1):
                left = max(posted[below], posted[s] + hops[3, s]) + hops[1, s]
                now[below] = max(now[below], left)
                now[s] = max(now[s], left + hops[2, s])
    return now
