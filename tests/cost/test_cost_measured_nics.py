"""Senders and groups that share a node's network cards on a link whose samples say what one did."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import LinearPredictor, island, link
from estimate_plans import FREE, SHAPE, stages_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.devices import HostInterface
from hetplan.cluster.node import Nics
from hetplan.cluster.spec import Cluster, Transport
from hetplan.cost.step_model.groups import crowd_of
from hetplan.cost.step_model.hops import (
    Hop,
    hop_between,
    host_copies_seconds,
)

CARD = 10e9
HIDDEN = 128 * 256 * 4  # one sequence of 128 tokens, float32


def cluster(cards: int | None, *, rate: float = CARD, measured: bool = True) -> Cluster:
    """Nodes of 4 devices; one pair reaches `rate` between them."""
    between = replace(link(rate), samples="between" if measured else None)
    one = replace(
        island("a", nodes=4),
        inter_node=between,
        nics=None if cards is None else Nics(per_node=cards, bandwidth_bytes_per_second=CARD),
    )
    return Cluster(name="c", islands=(one,))


def hop(found: Cluster, tp: int) -> Hop:
    """From the first devices of the first node to those of the second."""
    stages = [
        stages_of([[at]], [tp], 10, first_device=first, num_microbatches=4, tp=tp)[0]
        for at, first in ((0, 0), (5, 4))
    ]
    return hop_between(
        found, SHAPE, FREE, stages[0].replicas, stages[1].replicas, LinearPredictor()
    )


@pytest.mark.parametrize(
    ("cards", "tp", "rate", "slower"),
    [
        (1, 4, CARD, 4.0),  # four whole senders on one card
        (4, 4, CARD, 1.0),
        (1, 1, CARD, 1.0),
        (1, 4, CARD / 2, 2.0),  # together they fill the card that one fills by half
        (1, 4, CARD / 8, 1.0),  # and have room on it
        (1, 4, 2 * CARD, 4.0),  # the card's figure is too low
    ],
)
def test_senders_of_a_node_share_its_cards(cards: int, tp: int, rate: float, slower: float) -> None:
    found = hop(cluster(cards, rate=rate), tp)
    assert found.senders == tp
    assert found.send_forward_seconds == pytest.approx(slower * HIDDEN / rate)
    assert found.send_backward_seconds == pytest.approx(slower * HIDDEN / rate)


@given(tp=st.sampled_from([1, 2, 4]), rate=st.floats(1e8, 1e11))
@settings(max_examples=40, deadline=None)
def test_fewer_cards_are_never_faster_and_own_cards_change_nothing(tp: int, rate: float) -> None:
    sends = [hop(cluster(cards, rate=rate), tp).send_forward_seconds for cards in (1, 2, 4)]
    assert sends == sorted(sends, reverse=True)
    assert sends[-1] == hop(cluster(None, rate=rate), tp).send_forward_seconds
    # The figure of a link without samples is one device's share already.
    shares = {
        hop(cluster(cards, rate=rate, measured=False), tp).send_forward_seconds
        for cards in (1, 2, 4)
    }
    assert len(shares) == 1


def test_copies_to_the_host_share_the_uplink_of_a_switch() -> None:
    host = HostInterface(pcie_generation=4, lanes=16)
    one = island("a", nodes=4)
    one = replace(one, device=replace(one.device, host=host), switch_of_device=(0, 0, 1, 1))
    staged = replace(link(CARD), transport=Transport.HOST_STAGED)
    rate = host.bandwidth_bytes_per_second
    for senders, beside in ((1, 1), (2, 2), (4, 2), (3, 2)):
        found = host_copies_seconds(staged, one, one, 1e9, senders)
        assert found == pytest.approx(2 * beside * 1e9 / rate)
    # What was measured has its copies in it; device-direct links have none.
    assert host_copies_seconds(replace(staged, samples="s"), one, one, 1e9, 1) == 0.0
    assert host_copies_seconds(link(CARD), one, one, 1e9, 1) == 0.0
    unknown = replace(one, device=replace(one.device, host=None))
    assert host_copies_seconds(staged, unknown, unknown, 1e9, 4) == 0.0


# ---- groups


def strided(tp: int) -> list[list[int]]:
    return [list(range(offset, 16, tp)) for offset in range(tp)]


@pytest.mark.parametrize(
    ("cards", "tp", "rate", "share"),
    [
        (1, 4, CARD, 1 / 4),
        (4, 4, CARD, 1.0),
        (1, 2, CARD, 1 / 2),  # two of each group, which alone fill the card as well
        (1, 1, CARD, 1.0),  # one group: its samples have its own lanes
        (1, 4, CARD / 2, 1 / 2),
        (1, 4, CARD / 8, 1.0),
    ],
)
def test_groups_on_one_card_keep_their_part_of_what_was_measured(
    cards: int, tp: int, rate: float, share: float
) -> None:
    crowd = crowd_of(cluster(cards, rate=rate), strided(tp))
    kept = 1.0 if crowd is None else crowd.share(LinearPredictor(), 1e6)
    assert kept == pytest.approx(share)
