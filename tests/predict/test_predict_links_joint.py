"""How devices of a node are joined, by figures and sends, and what that does to other groups."""

from __future__ import annotations

import pytest
from predict_samples import link_sample

from hetplan.predict.link.carried import ONE_GROUP_LOG_HALFWIDTHS, Joint, JointClass, joint_of
from hetplan.predict.link.laws import collective_law, fit_link_laws
from hetplan.predict.link.prior import NODE_SEND

SIZES = [1 << exponent for exponent in range(20, 31)]
NVLINK = 450e9


def joint(peer: float | None, fabric: float = NVLINK) -> Joint:
    return Joint(fabric_bytes_per_second=fabric, one_peer_bytes_per_second=peer)


@pytest.mark.parametrize(
    ("peer", "fabric", "ranks", "kind", "times"),
    [
        (150e9, 450e9, 4, JointClass.EVEN, 3.0),  # links to each of three peers
        (150e9, 450e9, 3, JointClass.EVEN, 2.0),
        (300e9, 300e9, 8, JointClass.EVEN, 1.0),  # a switch: one peer gets all
        (81e9, 150e9, 4, JointClass.UNEVEN, 1.0),  # more than equal parts, less than all
        (None, 300e9, 4, JointClass.UNEVEN, 1.0),
        (12e9, 31.5e9, 4, JointClass.BUS, 1.0),
    ],
)
def test_figures_and_sends_say_how_devices_are_joined(
    peer: float | None, fabric: float, ranks: int, kind: JointClass, times: float
) -> None:
    found = joint(peer, fabric)
    assert found.kind(ranks) is kind
    assert found.less_reach(ranks, 2) == times
    assert found.less_reach(2, ranks) == pytest.approx(1.0 / times)
    assert found.log_halfwidth(ranks) == dict(ONE_GROUP_LOG_HALFWIDTHS)[kind]


def test_a_pair_of_a_mesh_is_carried_to_all_links() -> None:
    """Two of four use a third of each device's links: four go about three times as fast."""
    peer = 150e9 / NODE_SEND.bytes
    pair = [link_sample(60e-6 + size / peer, size) for size in SIZES]
    sends = [link_sample(60e-6 + size / peer, size, operation="send_recv") for size in SIZES]
    (law,) = fit_link_laws([*pair, *sends])
    found = joint_of(law.tables, NVLINK)
    assert found is not None
    assert found.kind(4) is JointClass.EVEN
    size = 1 << 29
    even, blind = (
        collective_law(law, "all_reduce", 4, size, fabric_bytes_per_second=fabric)
        for fabric in (NVLINK, 0.0)
    )
    assert even is not None
    assert blind is not None
    assert blind.seconds / even.seconds == pytest.approx(3.0, rel=0.02)
    # Among two it is the table either way.
    same = collective_law(law, "all_reduce", 2, size, fabric_bytes_per_second=NVLINK)
    assert same is not None
    assert same.seconds == pytest.approx(60e-6 + size / peer)
