"""Laws of links that nobody measured: their shape."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.links import Link, Transport
from hetplan.predict.fit import FittedPredictor
from hetplan.predict.link import prior

ON_PAPER = FittedPredictor.datasheet_only()
NVLINK = Link(
    bandwidth_bytes_per_second=300e9, latency_seconds=3e-6, transport=Transport.DEVICE_DIRECT
)
NIC = replace(NVLINK, bandwidth_bytes_per_second=25e9, latency_seconds=5e-6)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
REPEATABLE = settings(derandomize=True, deadline=None, max_examples=100)


@REPEATABLE
@given(
    st.sampled_from(OPERATIONS),
    st.integers(1, 64),
    st.integers(1, 16),
    st.floats(0, 1e11),
    st.floats(1, 100),
    st.floats(0, 0.1),
)
def test_more_bytes_slower_links_and_more_latency_never_take_less(
    operation: str, nodes: int, each: int, size: float, larger: float, latency: float
) -> None:
    ranks = nodes * each
    if ranks < 2:
        return

    def seconds(link: Link, message: float) -> float:
        return ON_PAPER.collective(link, operation, ranks, message, nodes=nodes).seconds

    base = seconds(NIC, size)
    # No message is faster than the call.
    assert base >= min(prior.NODE.base_seconds, prior.NODE_EXCHANGE.base_seconds)
    assert seconds(NIC, size * larger) >= base
    slower = replace(NIC, bandwidth_bytes_per_second=25e9 / larger)
    assert seconds(slower, size) >= base
    assert seconds(replace(NIC, latency_seconds=5e-6 + latency), size) >= base
