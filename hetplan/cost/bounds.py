"""Proven lower bounds of a step over uneven stages.

Here are the parts of the bounds (a), (b), (c), (i) and (l) of 1F1B that the search uses
(`hetplan.search.one_f_one_b.order_slots`).

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

from hetplan.kernels import kernel


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
