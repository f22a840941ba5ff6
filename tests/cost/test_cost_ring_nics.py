"""Which network cards the rings of groups use, and what that leaves of their speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_fakes import link
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.node import Nics, RingNics
from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.network.group_shares import ring_share
from hetplan.cost.step_model.end_of_step import tied_embedding_parts
from hetplan.cost.step_model.groups import KnownCollectives, group_among
from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.model.spec import Architecture, plain_model
from hetplan.predict.fit import FittedPredictor
from hetplan.profiling.samples import LinkOperation

KIND = DeviceKind(
    kind="any",
    vendor="any",
    peak_flops_per_second=(),
    memory_bytes=1.0,
    memory_bandwidth_bytes_per_second=1.0,
    provenance="datasheet",
    source="rings ask nothing of a device",
)
CARD = 25e9


def cluster(rings: RingNics, *, nodes: int = 8, cards: int = 4, staged: bool = False) -> Cluster:
    """Nodes of 8 devices behind cards of 25 GB/s."""
    inter = link(CARD * cards / 8, 5e-6, staged=staged)
    only = Island(
        name="only",
        region="here",
        device=KIND,
        nodes=nodes,
        devices_per_node=8,
        intra_node=link(300e9, 3e-6),
        inter_node=inter,
        memory_bytes=1.0,
        nics=Nics(per_node=cards, bandwidth_bytes_per_second=CARD, rings=rings),
    )
    return Cluster(name="c", islands=(only,))


def strided(tp: int, devices: int = 64) -> list[list[int]]:
    """Data-parallel groups where tensor-parallel ones of tp neighbours fill the devices."""
    return [list(range(offset, devices, tp)) for offset in range(tp)]


@pytest.mark.parametrize(
    ("rings", "tp", "cards"),
    [
        # (cards that all groups of a node use together)
        (RingNics.OWN, 1, 4),
        (RingNics.FIRST_DEVICE, 1, 4),
        (RingNics.FIRST_DEVICE, 2, 1),
        (RingNics.FIRST_DEVICE, 8, 4),
        (RingNics.ONE, 1, 1),
        (RingNics.ONE, 8, 4),
    ],
)
def test_groups_of_a_node_share_the_cards_that_their_rings_use(
    rings: RingNics, tp: int, cards: int
) -> None:
    groups = strided(tp)
    assert ring_share(cluster(rings), groups) == pytest.approx(cards / 4)
    group = group_among(cluster(rings), groups)
    assert group.share == pytest.approx(cards / 4)
    assert group.among == pytest.approx(1.0)
    # The bytes of all groups leave a node over so many cards.
    known = KnownCollectives(cluster(rings), FittedPredictor.datasheet_only())
    (term,) = known.of(group, LinkOperation.ALL_REDUCE, 1e12, "gradients")
    leaves = 2 * (64 / tp - 1) / (64 / tp) * 1e12 * tp
    assert term.seconds == pytest.approx(1.03 * leaves / (cards * CARD), rel=1e-2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(RingNics), st.integers(1, 64), st.randoms(use_true_random=False))
def test_shares_are_parts_and_own_cards_are_never_worse(
    rings: RingNics, size: int, random: object
) -> None:
    devices = list(range(64))
    random.shuffle(devices)  # type: ignore[attr-defined]
    groups = [devices[at : at + size] for at in range(0, 64, size)]
    share = ring_share(cluster(rings), groups)
    assert 0 < share <= 1
    assert ring_share(cluster(RingNics.OWN), groups) == 1.0


def test_rings_stay_on_rails() -> None:
    with pytest.raises(InputError, match="a ring stays on the rail of its devices"):
        Nics(per_node=8, bandwidth_bytes_per_second=CARD, rails=8, rings=RingNics.ONE)


def one_card(ends: int = 1) -> Cluster:
    """Islands of nodes with four devices behind one card."""
    islands = tuple(
        replace(
            cluster(RingNics.OWN).islands[0],
            name=name,
            nodes=2,
            devices_per_node=4,
            inter_node=link(CARD, 5e-6),
            nics=Nics(per_node=1, bandwidth_bytes_per_second=CARD),
        )
        for name in ("one", "two")[:ends]
    )
    between = replace(link(1e12, 5e-6), shared_bandwidth_bytes_per_second=1e12)
    return Cluster(name="c", islands=islands, within_region=between)


@pytest.mark.parametrize("ends", [1, 2])
@pytest.mark.parametrize(("senders", "part"), [(8, 4), (4, 4), (3, 3), (2, 2), (1, 1)])
def test_only_devices_that_send_share_a_card(senders: int, part: int, ends: int) -> None:
    """Tied embeddings of a stage of so many devices: all of a node's four, or fewer."""
    where = one_card(ends)
    first, last = where.islands[0], where.islands[-1]
    found = where.link_between(first.name, last.name).among(senders)
    assert found.bandwidth_bytes_per_second == pytest.approx(CARD / part)
    model = plain_model(
        name="m",
        architecture=Architecture.GPT,
        num_layers=2,
        hidden_size=4096,
        vocab_size=51200,
        max_sequence_length=1024,
        tied_embeddings=True,
        ffn_hidden_size=16384,
        num_attention_heads=32,
        num_kv_heads=32,
        head_dim=128,
    )
    known = KnownCollectives(where, FittedPredictor.datasheet_only())
    (tied,) = tied_embedding_parts(model, where, first, last, Precision.FLOAT32, 1, senders, known)
    # Two ranks: each sends the matrix once, by as much of the card as it has.
    seconds = 4.0 * 51200 * 4096 * part / CARD
    assert tied.term.seconds == pytest.approx(1.03 * seconds, rel=2e-2)


def test_rings_of_all_devices_pay_for_the_card_that_they_share() -> None:
    """A ring through all eight, and four rings of two: what leaves a node crosses one card."""
    where = one_card()
    known = KnownCollectives(where, FittedPredictor.datasheet_only())
    for groups, leaves in (
        ([list(range(8))], 2 * 7 / 8),
        ([[offset, offset + 4] for offset in range(4)], 4 * 2 * 1 / 2),
        ([[0, 4]], 2 * 1 / 2),
    ):
        group = group_among(where, groups)
        (term,) = known.of(group, LinkOperation.ALL_REDUCE, 1e12, "gradients")
        assert term.seconds == pytest.approx(1.03 * leaves * 1e12 / CARD, rel=2e-2)
