"""How fast can a 1F1B step over uneven stages possibly be: proven lower bounds in closed form.

They hold for every schedule in which each stage runs its microbatches in order, all forward and
backward passes of a stage on one device, with at most warmup[s] microbatches in flight (forward
started, backward not ended) and warmup not growing downstream: 1F1B as `hetplan.cost.replay`
defines it, with eager and with rendezvous sends. (a) needs only the order of one microbatch's
passes and holds for GPipe too; (b) and (c) need the order of 1F1B: min(warmup[s], m) forward
passes, then backward and forward in turn. None holds for interleaved or zero-bubble schedules.

Symbols: f_s, b_s forward and backward, c_s = f_s + b_s; t_s both transfers over boundary s | s+1,
2 * wire_latency + send_forward + send_backward; W_s = min(warmup[s], m); D_s (U_s) forward
(backward) passes and transfers upstream of s; suf_s everything downstream of s, t_s included;
R_s = c_s + suf_s, the round trip of one microbatch from s; Sigma = D_s + R_s + U_s for any s.

    (a)  Sigma - suf_s + (m - 1) c_s
    (b)  Sigma + (m - 1) c_s - (W_s - 1) min(f_s, b_s)
    (c)  Sigma + (m - 1) c_s + k (R_s - W_s c_s),   1 <= k <= floor((m - 1) / W_s)

Each is the length of one path of operations that must follow each other: D_s; then on stage s (b)
microbatch 0's round trip and the m - W_s forward and m - 1 backward passes left after it, or the
mirror image of that at the end of the step, and (c) k times from a forward pass over its round
trip to the forward pass W_s later, then the rest of s in turn and one last round trip; then U_s.
Every path ends with the last backward pass of all stages from s up to 0, so that
`after`[q] - U_q may be added for any q <= s.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from hetplan.cost.replay_kernel import Floats, Ints


@njit(cache=True)
def lower_bound_seconds(
    forward: Floats,
    backward: Floats,
    send_forward: Floats,
    send_backward: Floats,
    wire_latency: Floats,
    warmup: Ints,
    num_microbatches: int,
    after: Floats,
) -> float:
    """Seconds that no replay of these stages can beat: the best of (a), (b), (c), and `after`.

    Arguments as in `replay_seconds`.
    """
    bounds = stage_bounds_seconds(
        forward, backward, send_forward, send_backward, wire_latency, warmup, num_microbatches
    )
    best = 0.0
    upstream = 0.0  # U_q
    ending = -np.inf  # largest after[q] - U_q for q <= s
    for s in range(forward.shape[0]):
        ending = max(ending, after[s] - upstream)
        for bound in bounds[s]:
            best = max(best, bound + ending)
        upstream += backward[s]
        if s < forward.shape[0] - 1:
            upstream += send_backward[s] + wire_latency[s]
    return best


@njit(cache=True)
def stage_bounds_seconds(
    forward: Floats,
    backward: Floats,
    send_forward: Floats,
    send_backward: Floats,
    wire_latency: Floats,
    warmup: Ints,
    num_microbatches: int,
) -> Floats:
    """(a), (b) and (c) of every stage, [stages, 3], for the time until stage 0's last backward.

    (c) is minus infinity where no k exists (m <= W_s); its k is the best one.
    """
    m = num_microbatches
    num_stages = forward.shape[0]
    compute = forward + backward
    transfer = 2 * wire_latency + send_forward + send_backward
    sigma = compute.sum() + transfer.sum()
    bounds = np.empty((num_stages, 3))
    downstream = 0.0  # suf_s
    for s in range(num_stages - 1, -1, -1):
        if s < num_stages - 1:
            downstream += transfer[s] + compute[s + 1]
        in_flight = min(warmup[s], m)
        saturated = sigma + (m - 1) * compute[s]
        bounds[s, 0] = saturated - downstream
        bounds[s, 1] = saturated - (in_flight - 1) * min(forward[s], backward[s])
        most = (m - 1) // in_flight
        exposed = compute[s] + downstream - in_flight * compute[s]
        # Linear in k: the best k is at one end.
        bounds[s, 2] = -np.inf
        if most >= 1:
            bounds[s, 2] = saturated + max(exposed, most * exposed)
    return bounds
