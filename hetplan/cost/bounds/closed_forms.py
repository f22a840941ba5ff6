"""How fast can a step over uneven stages possibly be: proven lower bounds, and what each holds for.

                      1f1b  gpipe  interleaved-1f1b  zb-h1
    (a) (b) (c) (i)    x
    (l)                x      x           x            x
    flow shops                x                              exact with eager sends

The search uses the parts of (b), (c) and (i) directly (`hetplan.search.single.order_slots`).

The idea: a step cannot be shorter than a chain of passes and transfers in which each waits for the
one before it. Every bound is the length of one such chain. Whatever else makes a pass wait (a
rendezvous, a wire that other transfers use, another pipeline) only adds reasons to wait, so every
bound holds then too.

Symbols. m microbatches; W_s = min(warmup[s], m) forward passes of stage s before its first
backward pass, not growing downstream. What a pass of stage s adds to a chain depends on what comes
before it in the chain:

    F'_s, B'_s   the same microbatch's pass on the neighbour: its transfer, then the pass
    F_s, B_s     the stage's own previous pass. Eager sends: the pass alone. Rendezvous sends: the
                 stage posts its receive only after that pass, and data flows only then, so
                 rendezvous_extra and the transfer come before the pass.

    C_s          F_s + B_s
    Sigma        sum of all F' + B': one microbatch's way down and up again, alone
    D_s          the part of Sigma downstream of s
    U_s          the B' upstream of s
    R_s          D_s + B'_s + F_s, a round trip: from a forward pass of s down to the last stage, up
                 to the backward pass of the same microbatch, and on to the forward pass that this
                 makes room for, W_s microbatches later
    R_sj         F_s + B'_s + (F' + B' between s and j) + F'_j + B_j, a shorter round trip: down to
                 stage j > s only, where the backward pass that comes next is of a microbatch
                 W_j - 1 earlier; it gets q = W_s - W_j + 1 microbatches further

The bounds, for every stage s (left out as an index), j and whole number k that is allowed:

    (a)  Sigma - D_s - B'_s + (m - 1) F + m B
    (b)  Sigma + (m - 1) C - (W_s - 1) min(F, B)
    (c)  Sigma + (m - 1) C + k (R_s - W_s C),           1 <= k <= (m - 1) // W_s
    (i)  Sigma + (m - W_j) C + (W_j - 1) max(F, B) + k (R_sj - q C),   1 <= k <= (m - W_j) // q
         Sigma + (m - 1) C + (R_s - W_s C) + k (R_sj - q C),       0 <= k <= (m - 1 - W_s) // q
    (l)  Sigma + (m - 1) send                           either direction of a boundary

Their chains:

    (a)  microbatch 0 down to s, all other passes of s, the last gradient up to stage 0
    (b)  microbatch 0 down and back up to s, the m - W_s forward and m - 1 backward passes that s
         has left, up to stage 0; or the mirror image of this in time
    (c)  microbatch 0 down to s, k round trips R_s, forward and backward passes of s in turn, the
         last microbatch's round trip, up to stage 0
    (i)  microbatch 0 down to s, W_j - 1 forward passes of s (or one round trip R_s), k round trips
         R_sj, then as (c)
    (l)  one microbatch's way, and m - 1 more messages over the same boundary

What follows a stage's last pass (`after`) is added at the end. The chains of (a), and of (b) where
B is last, say nothing of stages below s: there the largest after[q] - U_q of q <= s is added. The
other chains pass the last backward pass of every stage q: there it is the largest of all q.
"""

from __future__ import annotations

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.kernels import kernel, sum_of

WAIT_ONCE_STAGE, WAIT_ONCE, ROUND_TRIPS, INTERVAL, WIRE = range(5)
"""Columns of `stage_bounds_seconds`: (a), (b), (c), (i), (l)."""


@kernel
def wait_once_seconds(forward: float, backward: float, microbatches: int, in_flight: int) -> float:
    """(b) less Sigma: what a stage's serial times add to one microbatch's way."""
    return (microbatches - 1) * (forward + backward) - (in_flight - 1) * min(forward, backward)


@kernel
def downstream_room_seconds(
    limit: float,
    forward: float,
    backward: float,
    backward_dependency: float,
    microbatches: int,
    in_flight: int,
) -> float:
    """Most D_s with which (c) of a stage stays within Sigma + `limit`; infinite without a k."""
    longest = (microbatches - 1) // in_flight
    if longest < 1:
        return np.inf
    c = forward + backward
    turn = backward_dependency + forward
    return min(
        limit - (microbatches - 1) * c + in_flight * c - turn,
        (limit - (microbatches - 1) * c) / longest + in_flight * c - turn,
    )


@kernel
def interval_seconds(
    circuit: float,
    forward: float,
    backward: float,
    microbatches: int,
    in_flight: int,
    turning: int,
) -> float:
    """First line of (i) less Sigma for R_sj = `circuit`, W_j = `turning`; -infinity without a k."""
    ahead = in_flight - turning + 1
    most = (microbatches - turning) // ahead
    if most < 1:
        return -np.inf
    c = forward + backward
    gain = circuit - ahead * c
    return (
        (microbatches - turning) * c
        + (turning - 1) * max(forward, backward)
        + max(gain, most * gain)
    )


@kernel
def interval_room_seconds(
    limit: float,
    circuit: float,
    forward: float,
    backward: float,
    backward_dependency: float,
    microbatches: int,
    in_flight: int,
    turning: int,
) -> float:
    """Most D_s with which the second line of (i) stays within Sigma + `limit`; infinite without k.

    For R_sj = `circuit` and W_j = `turning`.
    """
    if microbatches - 1 < in_flight:
        return np.inf
    c, ahead = forward + backward, in_flight - turning + 1
    more = ((microbatches - 1 - in_flight) // ahead) * max(0.0, circuit - ahead * c)
    return limit - (microbatches - 1 - in_flight) * c - backward_dependency - forward - more


@kernel
def busy_seconds(before: float, own: float, microbatches: int) -> float:
    """No step of any schedule is shorter: both passes `own` of a stage m times, after and before
    one microbatch's passes on the stages upstream.
    """
    return before + microbatches * own


@kernel
def _two_forms(
    forward: Floats,
    backward: Floats,
    send_forward: Floats,
    send_backward: Floats,
    wire_latency: Floats,
    rendezvous_extra: Floats,
    rendezvous: bool,
) -> Floats:
    """F', B', F, B of every stage, [4, stages]."""
    times = np.empty((4, forward.shape[0]))
    times[0] = times[2] = forward
    times[1] = times[3] = backward
    for s in range(forward.shape[0] - 1):
        times[0, s + 1] += send_forward[s] + wire_latency[s]
        times[1, s] += send_backward[s] + wire_latency[s]
        if rendezvous:
            times[2, s + 1] += rendezvous_extra[s] + send_forward[s] + wire_latency[s]
            times[3, s] += rendezvous_extra[s] + send_backward[s] + wire_latency[s]
    return times


@kernel
def lower_bound_seconds(
    forward: Floats,
    backward: Floats,
    send_forward: Floats,
    send_backward: Floats,
    wire_latency: Floats,
    rendezvous_extra: Floats,
    warmup: Ints,
    num_microbatches: int,
    after: Floats,
    rendezvous: bool,
) -> float:
    """Seconds that no 1F1B step of these stages can beat: the best of (a), (b), (c), (i), (l).

    Arguments as in `replay_seconds`.
    """
    return float(
        stage_bounds_seconds(
            forward,
            backward,
            send_forward,
            send_backward,
            wire_latency,
            rendezvous_extra,
            warmup,
            num_microbatches,
            after,
            rendezvous,
        ).max()
    )


@kernel
def stage_bounds_seconds(
    forward: Floats,
    backward: Floats,
    send_forward: Floats,
    send_backward: Floats,
    wire_latency: Floats,
    rendezvous_extra: Floats,
    warmup: Ints,
    num_microbatches: int,
    after: Floats,
    rendezvous: bool,
) -> Floats:
    """(a), (b), (c), (i), (l) of every stage, [stages, 5]; minus infinity where there is none."""
    m, num_stages = num_microbatches, forward.shape[0]
    times = _two_forms(
        forward, backward, send_forward, send_backward, wire_latency, rendezvous_extra, rendezvous
    )
    way_down, way_up, serial_forward, serial_backward = times[0], times[1], times[2], times[3]
    sigma = sum_of(way_down) + sum_of(way_up)
    depth = np.minimum(warmup, m)
    # Largest after[q] - U_q over the stages up to s, and over all.
    ending = np.empty(num_stages)
    upstream, largest = 0.0, -np.inf
    for s in range(num_stages):
        largest = max(largest, after[s] - upstream)
        ending[s] = largest
        upstream += way_up[s]
    bounds = np.full((num_stages, 5), -np.inf)
    downstream = 0.0  # D_s
    for s in range(num_stages - 1, -1, -1):
        f, b, w = serial_forward[s], serial_backward[s], depth[s]
        c = f + b
        bounds[s, 0] = sigma - downstream - way_up[s] + (m - 1) * f + m * b + ending[s]
        bounds[s, 1] = sigma + max(
            (m - w) * f + (m - 1) * b + ending[s], (m - 1) * f + (m - w) * b + largest
        )
        trip = downstream + way_up[s] + f
        most = (m - 1) // w
        if most >= 1:
            exposed = trip - w * c
            bounds[s, 2] = sigma + (m - 1) * c + max(exposed, most * exposed) + largest
        circuit = f + way_up[s]  # R_sj less what belongs to j
        for j in range(s + 1, num_stages):
            turning, ahead = depth[j], w - depth[j] + 1
            whole = circuit + way_down[j] + serial_backward[j]
            circuit += way_down[j] + way_up[j]
            # After max(F, B) = B the path has not run the stages below s: the smaller ending.
            interval = interval_seconds(whole, f, b, m, w, turning)
            if turning > 1 and b > f:
                slack = (turning - 1) * (b - f)
                interval = max(interval + ending[s], interval - slack + largest)
            else:
                interval += largest
            gain = whole - ahead * c
            if m - 1 >= w:
                more = max(0.0, ((m - 1 - w) // ahead) * gain)
                interval = max(interval, (m - 1) * c + trip - w * c + more + largest)
            bounds[s, 3] = max(bounds[s, 3], sigma + interval)
        if s < num_stages - 1:
            bounds[s, 4] = sigma + max(
                (m - 1) * send_forward[s] + largest, (m - 1) * send_backward[s] + ending[s]
            )
        downstream += way_down[s] + way_up[s]
    return bounds


@kernel
def gpipe_bound_seconds(
    forward: Floats,
    backward: Floats,
    send_forward: Floats,
    send_backward: Floats,
    wire_latency: Floats,
    rendezvous_extra: Floats,
    num_microbatches: int,
    after: Floats,
    rendezvous: bool,
) -> float:
    """Seconds that no GPipe step can beat; exact with eager sends over wires of their own.

    All forward passes, then all backward passes are two flow shops of equal jobs: m of them take
    one job's way and m - 1 times the slowest machine, stage or wire. Every stage's first backward
    pass waits for the last stage's last forward pass. Arguments as in `replay_seconds`.
    """
    m, num_stages = num_microbatches, forward.shape[0]
    times = _two_forms(
        forward, backward, send_forward, send_backward, wire_latency, rendezvous_extra, rendezvous
    )
    end = sum_of(times[0]) + (m - 1) * max(times[2].max(), _largest(send_forward))
    step, slowest = 0.0, 0.0
    for s in range(num_stages - 1, -1, -1):
        end += times[1, s]
        slowest = max(slowest, times[3, s])
        if s < num_stages - 1:
            slowest = max(slowest, send_backward[s])
        step = max(step, end + (m - 1) * slowest + after[s])
    return step


@kernel
def _largest(values: Floats) -> float:
    largest = 0.0
    for value in values:
        largest = max(largest, value)
    return largest
