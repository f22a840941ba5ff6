"""Under which name predictions about one thing err together: device kinds, links, classes of links.

Kinds of devices are one word. A link is named by its samples, or by the figures of the cluster
file where it has none.
"""

from __future__ import annotations

from functools import lru_cache

from hetplan.cluster.spec import Link
from hetplan.units import format_bandwidth, format_seconds

SAMPLES_OF = "link "
_FIGURES = " link of "


@lru_cache(maxsize=4096)
def link_cause(link: Link) -> str:
    """Name under which predictions about this link err together: its samples, or its figures."""
    if link.samples is not None:
        return f"{SAMPLES_OF}{link.samples}"
    return (
        f"{link.transport.value}{_FIGURES}{format_bandwidth(link.goodput_bytes_per_second)}, "
        f"{format_seconds(link.latency_seconds)}"
    )


def is_link(cause: str) -> bool:
    """Whether a cause is a link; otherwise it is a device kind."""
    return " " in cause


def calibrated_cause(cause: str) -> str:
    """Name under which runs correct predictions of this cause.

    A link without samples goes by transport and latency: its bandwidth is a sender's share, which
    differs with the number of senders.
    """
    transport, figures, rest = cause.partition(_FIGURES)
    if not figures or cause.startswith(SAMPLES_OF):
        return cause
    return f"{transport} link without samples, {rest.rpartition(', ')[2]}"
