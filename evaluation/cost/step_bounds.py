"""Lower bounds for interleaved 1F1B, split backward passes (zb-h1) and wires that messages share.

They continue `hetplan.cost.bounds`: each is the length of a chain of passes and
transfers that must follow each other. Virtual stage k is chunk k // P of stage k % P, K = P v of
them; hop k leads from k to k + 1. Between stages a transfer counts in full, between passes of one
stage not at all: a trainer that posts receives early does not wait to post
(`hetplan.cost.replay.programs`).

Walks. What one stage does is a fixed order: forward passes x = 0 .. N - 1 (N = m v), n_s of them
before its first backward pass; then B_y and F_{y + n_s} in turn, with the weight pass of
microbatch y - lag_s between them where the backward pass is split. T_s(x) is when F_x would end
if the stage never waited. A chain may

    start      with one microbatch's way down to a first pass of a chunk, forward or backward
    follow     the stage's order: T_s(x') - T_s(x) from F_x to F_x'
    circle     leave s after F_x, come back with a backward pass y and go on with F_{y + n_s}:
               down to stage j of the same chunk, and back with the backward pass B_{x - n_j + 1}
               that j runs next; or round the whole pipeline; or over the boundary between two
               chunks (s = P - 1, j = 0)
    end        with the last microbatch's way from a last pass of a chunk, and `after`

Starts and ends of all chunks are combined freely. Circles of one kind are taken one after the other
from the earliest place on, each where it is longer than following the order.
One bound walks the whole order several times and costs more than a compiled replay: it is there to
judge what was found, not to prune cuts.

Wires. What one stage sends to another leaves message after message, all chunks and, with two
stages, both directions; a shared wire serves one message at a time too. For any set of messages
that do so: least time to the first one + seconds of all + least time after the last one.
"""

from __future__ import annotations

import numpy as np

from hetplan.cost.arrays import Floats, Ints
from hetplan.cost.bounds import interval_seconds
from hetplan.cost.replay.times import PipelineTimes
from hetplan.kernels import kernel, order_of, sum_of


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


@kernel
def chain_seconds(
    forward: Floats,
    backward: Floats,
    send_forward: Floats,
    send_backward: Floats,
    wire_latency: Floats,
) -> Floats:
    """One microbatch's way alone, [2, K]: until the end of F on virtual stage k, and from the end
    of B there to the end of B on virtual stage 0. Pass times are [stages, chunks].
    """
    num_stages, chunks = forward.shape
    count = num_stages * chunks
    way = np.zeros((2, count))
    way[0, 0] = forward[0, 0]
    for k in range(1, count):
        s, c = k % num_stages, k // num_stages
        before = (k - 1) % num_stages, (k - 1) // num_stages
        way[0, k] = way[0, k - 1] + forward[s, c]
        way[1, k] = way[1, k - 1] + backward[before]
        if num_stages > 1:
            way[0, k] += send_forward[k - 1] + wire_latency[k - 1]
            way[1, k] += send_backward[k - 1] + wire_latency[k - 1]
    return way


@kernel
def endings_seconds(way_up: Floats, weight: Floats, lag: Ints, m: int, after: Floats) -> Floats:
    """[P] how much later than stage 0's last B the step ends, at least, for what runs after the
    last B of the stages up to s: their last weight passes and `after`.
    """
    ending = np.empty(after.shape[0])
    largest = -np.inf
    for s in range(after.shape[0]):
        left = m - max(0, m - 1 - lag[s])
        largest = max(largest, left * weight[s, 0] + after[s] - way_up[s])
        ending[s] = largest
    return ending


@kernel
def _order(num_stages: int, chunks: int, m: int) -> Ints:
    """[2, N] chunk and microbatch of every forward pass.

    The y-th backward pass is the same with chunks counted from the last. Passes of microbatches
    from m on fill the last group; they are not there and take no time.
    """
    groups = (m + num_stages - 1) // num_stages
    padded = groups * num_stages if chunks > 1 else m
    order = np.empty((2, padded * chunks), np.int64)
    at = 0
    for first in range(0, padded, num_stages):
        for chunk in range(chunks):
            for i in range(first, min(first + num_stages, padded)):
                order[0, at], order[1, at] = chunk, i
                at += 1
    return order


@kernel
def walk_bound_seconds(
    forward: Floats,
    backward: Floats,
    weight: Floats,
    send_forward: Floats,
    send_backward: Floats,
    wire_latency: Floats,
    depth: Ints,
    lag: Ints,
    num_microbatches: int,
    after: Floats,
) -> float:
    """Seconds that no step of this order can beat (see above).

    Pass times [P, v], zero `weight` where the backward pass is whole; hop times [P v - 1]; depth
    and lag [P]: n_s and how many microbatches the weight passes come later.
    """
    num_stages, chunks = forward.shape
    m = num_microbatches
    way = chain_seconds(forward, backward, send_forward, send_backward, wire_latency)
    last = num_stages * chunks - 1
    sigma = way[0, last] + backward[num_stages - 1, chunks - 1] + way[1, last]
    ending = endings_seconds(way[1], weight, lag, m, after)
    order = _order(num_stages, chunks, m)
    total = order.shape[1]
    clock, clock_back = np.empty(total), np.empty(total)
    final = _last_of_chunk(num_stages, chunks, m, total, chunks - 1)
    best = 0.0
    if num_stages > 1:
        best = _lanes(num_stages, m, send_forward, send_backward, way, sigma, ending)
    for s in range(num_stages):
        _set_clocks(
            forward[s], backward[s], weight[s, 0], depth[s], lag[s], m, order, clock, clock_back
        )
        best = max(best, _straight(s, chunks, m, way, sigma, depth, clock, clock_back, ending))
        finish = sigma - way[0, last - (num_stages - 1 - s)] + clock[final] + ending[-1]
        finish = max(finish, way[1, s] + clock_back[final] + ending[s])
        for kind in range(s + 1, num_stages + 1):
            wraps = kind == num_stages and s == num_stages - 1 and num_stages > 1 and chunks > 1
            for wrap in range(2 if wraps else 1):
                for late in range(2):
                    place = depth[s] if late else (depth[kind] - 1 if kind < num_stages else 0)
                    if place > final:
                        continue
                    begin = _begin(s, chunks, place, way, sigma, depth, clock, clock_back)
                    gain = _circles(
                        s, kind + wrap, place, forward, backward, weight[s, 0], way, sigma, depth,
                        lag[s], m, final, order, clock,
                    )  # fmt: skip
                    best = max(best, begin + gain + finish)
    return best


@kernel
def _lanes(
    num_stages: int,
    m: int,
    send_forward: Floats,
    send_backward: Floats,
    way: Floats,
    sigma: float,
    ending: Floats,
) -> float:
    """Longest time of what one stage sends to another."""
    hops = send_forward.shape[0]
    earliest, occupied = np.empty(2 * hops), np.empty(2 * hops)
    remaining = np.empty(2 * hops)
    messages = np.full(2 * hops, m)
    best = 0.0
    for lane in range(2 * num_stages):
        count = 0
        for k in range(hops):
            if k % num_stages == lane:
                earliest[count], occupied[count] = way[0, k], send_forward[k]
                remaining[count] = sigma - way[0, k] - send_forward[k] + ending[-1]
                count += 1
            # The second of two stages sends gradients, and activations of the next chunk.
            if ((k + 1) % 2 if num_stages == 2 else num_stages + k % num_stages) == lane:
                earliest[count], occupied[count] = sigma - way[1, k + 1], send_backward[k]
                below = ending[min(k, num_stages - 1)]
                remaining[count] = way[1, k + 1] - send_backward[k] + below
                count += 1
        bound = shared_wire_seconds(
            earliest[:count], occupied[:count], messages[:count], remaining[:count]
        )
        best = max(best, bound)
    return best


@kernel
def _last_of_chunk(num_stages: int, chunks: int, m: int, total: int, place: int) -> int:
    """Position of the last microbatch's pass through the place-th chunk of its group."""
    if chunks == 1:
        return m - 1
    return total + (place - chunks) * num_stages + (m - 1) % num_stages


@kernel
def _set_clocks(
    forward: Floats,
    backward: Floats,
    weight: float,
    depth: int,
    lag: int,
    m: int,
    order: Ints,
    clock: Floats,
    clock_back: Floats,
) -> None:
    """When F_x and B_y of one stage end if it never waits."""
    total, chunks = order.shape[1], forward.shape[0]
    now = 0.0
    for x in range(min(depth, total)):
        if order[1, x] < m:
            now += forward[order[0, x]]
        clock[x] = now
    for y in range(total):
        if order[1, y] < m:
            now += backward[chunks - 1 - order[0, y]]
        clock_back[y] = now
        if y >= lag:
            now += weight
        if y + depth < total:
            if order[1, y + depth] < m:
                now += forward[order[0, y + depth]]
            clock[y + depth] = now


@kernel
def _begin(
    s: int,
    chunks: int,
    place: int,
    way: Floats,
    sigma: float,
    depth: Ints,
    clock: Floats,
    clock_back: Floats,
) -> float:
    """Largest start before F_place, less its clock."""
    num_stages = depth.shape[0]
    begin = -np.inf
    for c in range(chunks):
        x, y, k = c * num_stages, (chunks - 1 - c) * num_stages, c * num_stages + s
        if x <= place:
            begin = max(begin, way[0, k] - clock[x])
        if y + depth[s] <= place:
            begin = max(begin, sigma - way[1, k] - clock_back[y])
    return begin


@kernel
def _straight(
    s: int,
    chunks: int,
    m: int,
    way: Floats,
    sigma: float,
    depth: Ints,
    clock: Floats,
    clock_back: Floats,
    ending: Floats,
) -> float:
    """Longest path of a start, the stage's order and an end."""
    num_stages, n = depth.shape[0], depth[s]
    total = clock.shape[0]
    best = -np.inf
    for first in range(chunks):
        k = first * num_stages + s
        x, y = first * num_stages, (chunks - 1 - first) * num_stages
        down, up = way[0, k] - clock[x], sigma - way[1, k] - clock_back[y]
        for final in range(chunks):
            k = final * num_stages + s
            x_end = _last_of_chunk(num_stages, chunks, m, total, final)
            y_end = _last_of_chunk(num_stages, chunks, m, total, chunks - 1 - final)
            by_forward = sigma - way[0, k] + clock[x_end] + ending[-1]
            by_backward = way[1, k] + clock_back[y_end] + ending[-1 if final else s]
            if x <= x_end:
                best = max(best, down + by_forward)
            # n exceeds x: a first forward pass is always before a last backward pass.
            best = max(best, down + by_backward)
            if y + n <= x_end:
                best = max(best, up + by_forward)
            if y <= y_end:
                best = max(best, up + by_backward)
    return best


@kernel
def _circles(
    s: int,
    kind: int,
    place: int,
    forward: Floats,
    backward: Floats,
    weight: float,
    way: Floats,
    sigma: float,
    depth: Ints,
    lag: int,
    m: int,
    final: int,
    order: Ints,
    clock: Floats,
) -> float:
    """How much longer circles of one kind from F_place on are than the stage's order.

    kind: the stage that turns, P for the whole pipeline, P + 1 for the boundary between chunks.
    """
    num_stages, chunks = forward.shape
    n = depth[s]
    won = 0.0
    x = place
    while x < final:
        c = order[0, x]
        k = c * num_stages + s
        y, cost = -1, 0.0
        if kind < num_stages:
            y = x - depth[kind] + 1
            if y >= 0:
                back = (chunks - 1 - order[0, y]) * num_stages
                cost = way[0, k - s + kind] - way[0, k]
                cost += backward[kind, chunks - 1 - order[0, y]]
                cost += way[1, back + kind] - way[1, back + s]
        elif kind == num_stages:
            y = x - c * num_stages
            cost = sigma - way[1, (chunks - 1) * num_stages + s] - way[0, k]
        elif c < chunks - 1:
            turned = x + num_stages - depth[0] + 1
            if turned >= 0 and order[0, turned] < chunks - 1:
                back = (chunks - 1 - order[0, turned]) * num_stages
                y = turned + num_stages
                cost = way[0, k + 1] - way[0, k] + backward[0, back // num_stages]
                cost += way[1, back] - way[1, back - 1]
        after = y + n
        if order[1, x] >= m or y < 0 or order[1, y] >= m or after <= x or after > final:
            x += 1
            continue
        if order[1, after] < m:
            cost += forward[s, order[0, after]]
        if y >= lag:
            cost += weight
        gain = cost - (clock[after] - clock[x])
        if gain > 0.0:
            won += gain
            x = after
        else:
            x += 1
    return won


@kernel
def shared_wire_seconds(
    earliest: Floats, occupied: Floats, messages: Ints, remaining: Floats
) -> float:
    """Seconds until everything that crosses one shared wire is done, at least.

    One entry per hop and direction that crosses it: when its first message can be ready, seconds
    of one message on the wire, how many, and seconds from the end of its service to the end of the
    step. Best over all sets of entries that are ready no sooner and take no less afterwards than
    two of them.
    """
    by_end = order_of(-remaining)
    best = 0.0
    for first in earliest:
        served = 0.0
        for at in by_end:
            if earliest[at] >= first:
                served += occupied[at] * messages[at]
                best = max(best, first + served + remaining[at])
    return best


def pipeline_bound_seconds(
    times: PipelineTimes, *, rendezvous: bool, after: Floats | None = None
) -> float:
    """Seconds that one pipeline cannot beat, by the bounds that hold for its schedule."""
    num_stages, m = times.num_stages, times.num_microbatches
    tail = np.zeros(num_stages) if after is None else after
    sends = without_sharing(times)
    if times.virtual_stages > 1 or times.schedule == "zb-h1":
        split = times.schedule == "zb-h1"
        return float(
            walk_bound_seconds(
                times.forward,
                times.backward,
                times.weight if split else np.zeros_like(times.weight),
                *sends,
                _depths(times),
                np.arange(num_stages) * int(split),
                m,
                tail,
            )
        )
    arguments = (times.forward[:, 0], times.backward[:, 0], *sends, times.rendezvous_extra)
    if times.schedule == "gpipe":
        return float(gpipe_bound_seconds(*arguments, m, tail, rendezvous))
    # Interleaved 1F1B of one chunk is 1F1B, but posts its receives early.
    own = times.schedule == "1f1b"
    depth = np.array(times.warmup, np.int64) if own else np.arange(num_stages, 0, -1)
    return float(lower_bound_seconds(*arguments, depth, m, tail, rendezvous and own))


def _depths(times: PipelineTimes) -> Ints:
    """Forward passes before the first backward pass, those counted that fill the last group."""
    left = np.arange(times.num_stages - 1, -1, -1)
    if times.schedule == "interleaved-1f1b":
        return 2 * left + (times.virtual_stages - 1) * times.num_stages + 1
    return np.minimum(left + 1, times.num_microbatches)


def without_sharing(times: PipelineTimes) -> tuple[Floats, Floats, Floats]:
    """Sends and latency of every hop, as if each had its wires for itself."""
    return (
        np.where(
            times.link_forward >= 0,
            np.maximum(times.send_forward, times.shared_forward),
            times.send_forward,
        ),
        np.where(
            times.link_backward >= 0,
            np.maximum(times.send_backward, times.shared_backward),
            times.send_backward,
        ),
        times.wire_latency,
    )
