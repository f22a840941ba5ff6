"""How a long 1F1B step grows, for the tests of the bounds."""

from __future__ import annotations

import numpy as np
from cost_fakes import Case


def steady_cycle_seconds(case: Case) -> float:
    """What one more microbatch costs a long 1F1B step with eager sends.

    The largest of a stage's passes, a send, and a round trip from stage s to a stage j > s and back
    over the W_s - W_j + 1 microbatches that it gets further: in the long run the step grows by
    exactly that, because a simple circuit of the graph of events crosses from forward to backward
    passes once only.
    """
    forward, backward, send_forward, send_backward, latency, _, warmup = case.arguments()[:7]
    hop = np.concatenate(([0.0], send_forward + latency))
    back = np.concatenate((send_backward + latency, [0.0]))
    cycle = max(float((forward + backward).max()), *send_forward, *send_backward, 0.0)
    for s in range(len(forward)):
        circuit = forward[s] + backward[s] + back[s]
        for j in range(s + 1, len(forward)):
            whole = circuit + hop[j] + forward[j] + backward[j]
            cycle = max(cycle, float(whole) / (warmup[s] - warmup[j] + 1))
            circuit += hop[j] + forward[j] + back[j] + backward[j]
    return cycle
