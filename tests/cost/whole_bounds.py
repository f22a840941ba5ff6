"""The whole bounds of a 1F1B step, put together from the parts that the search uses.

Symbols and proofs: `hetplan.cost.bounds`.
"""

from __future__ import annotations

import numpy as np

from hetplan.cost.arrays import Floats
from hetplan.cost.bounds import interval_seconds
from hetplan.cost.replay.kernel import StageTimes
from hetplan.kernels import kernel, sum_of


@kernel
def _two_forms(times: StageTimes, rendezvous: bool) -> Floats:
    """F', B', F, B of every stage, [4, stages]."""
    forms = np.empty((4, times.forward.shape[0]))
    forms[0] = forms[2] = times.forward
    forms[1] = forms[3] = times.backward
    for s in range(times.forward.shape[0] - 1):
        down = times.send_forward[s] + times.wire_latency[s]
        up = times.send_backward[s] + times.wire_latency[s]
        forms[0, s + 1] += down
        forms[1, s] += up
        if rendezvous:
            forms[2, s + 1] += times.rendezvous_extra[s] + down
            forms[3, s] += times.rendezvous_extra[s] + up
    return forms


@kernel
def stage_bounds_seconds(times: StageTimes, after: Floats, rendezvous: bool) -> Floats:
    """(a), (b), (c), (i), (l) of every stage, [stages, 5]; minus infinity where there is none."""
    m, num_stages = times.num_microbatches, times.forward.shape[0]
    way_down, way_up, serial_forward, serial_backward = _two_forms(times, rendezvous)
    sigma = sum_of(way_down) + sum_of(way_up)
    depth = np.minimum(times.warmup, m)
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
                (m - 1) * times.send_forward[s] + largest,
                (m - 1) * times.send_backward[s] + ending[s],
            )
        downstream += way_down[s] + way_up[s]
    return bounds
