"""Link samples to laws: exact where measured, monotone, honest elsewhere; ring laws by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict_samples import LINK, link_sample

from hetplan.cluster.links import Transport
from hetplan.errors import InputError
from hetplan.predict.fit import FittedPredictor, fit
from hetplan.predict.link.carried import CARRY_LOG_PER_DOUBLING, ONE_GROUP_LOG_HALFWIDTHS, joint_of
from hetplan.predict.link.laws import fit_link_laws
from hetplan.predict.link.prior import LINK_LOG_HALFWIDTH
from hetplan.profiling.samples import LinkSample, ProfileSet

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=60)
SIZES = (4096, 65536, 524288, 2 << 20, 8 << 20, 32 << 20)


def fitted(samples: list[LinkSample]) -> FittedPredictor:
    return fit(ProfileSet(layers=(), links=tuple(samples), provenance=()))


def seconds(predictor: FittedPredictor, operation: str, ranks: int, size: float) -> float:
    return predictor.collective(LINK, operation, ranks, size).seconds


def curve(size: float) -> float:
    """Latency, then 1 GB/s, then a slower protocol for messages above 1 MB."""
    return 1e-4 + size / 1e9 + max(0.0, size - 1e6) / 2e9


@REPEATABLE
@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 30), st.floats(1e-6, 1e2)),
        min_size=1,
        max_size=8,
        unique_by=lambda pair: pair[0],
    ),
    st.lists(st.floats(0, 2e9), min_size=2, max_size=6),
)
def test_times_never_fall_with_size_and_are_positive(
    points: list[tuple[int, float]], asked: list[float]
) -> None:
    predictor = fitted([link_sample(time, size) for size, time in points])
    times = [seconds(predictor, "all_reduce", 2, size) for size in sorted(asked)]
    assert all(time >= 0 for time in times)
    assert all(right >= left * (1 - 1e-9) for left, right in pairwise(times))


def test_measured_sizes_are_met_exactly_and_the_rest_is_linear() -> None:
    predictor = fitted([link_sample(curve(size), size) for size in SIZES])
    for size in SIZES:
        prediction = predictor.collective(LINK, "all_reduce", 2, size)
        assert prediction.seconds == curve(size)
        assert prediction.source == "measured"
        assert prediction.extrapolating == ()
    middle = (SIZES[3] + SIZES[4]) / 2
    assert seconds(predictor, "all_reduce", 2, middle) == pytest.approx(curve(middle))


def test_times_that_fall_are_averaged_with_their_neighbour() -> None:
    predictor = fitted([link_sample(4e-3, 1000), link_sample(1e-3, 2000), link_sample(9e-3, 4000)])
    assert seconds(predictor, "all_reduce", 2, 1000) == pytest.approx(2e-3)
    assert seconds(predictor, "all_reduce", 2, 2000) == pytest.approx(2e-3)
    assert seconds(predictor, "all_reduce", 2, 4000) == 9e-3
    # Of sends a first message that took longer paid for the warm-up.
    warm = [(1000, 4e-3), (2000, 1e-3), (4000, 9e-3)]
    sends = fitted([link_sample(time, at, operation="send_recv") for at, time in warm])
    assert sends.laws.links[0].tables[0].seconds == (1e-3, 1e-3, 9e-3)


def test_beyond_the_largest_size_the_last_segment_goes_on_and_says_so() -> None:
    predictor = fitted([link_sample(curve(size), size) for size in SIZES])
    inside = predictor.collective(LINK, "all_reduce", 2, SIZES[-1])
    beyond = predictor.collective(LINK, "all_reduce", 2, 4 * SIZES[-1])
    assert beyond.seconds == pytest.approx(curve(4 * SIZES[-1]))
    assert beyond.extrapolating == ("all_reduce message 128 MiB > 32 MiB measured",)
    assert beyond.log_halfwidth > inside.log_halfwidth
    below = predictor.collective(LINK, "all_reduce", 2, 0)
    assert below.seconds == pytest.approx(curve(0))
    assert "<" in below.extrapolating[0]


def ring(ranks: int, size: float, nodes: int = 1) -> float:
    """A truth in the form of the algorithm: 50 us, 2 us a step, 9 us more across, 5 GB/s."""
    lane = size if nodes == 1 else size * nodes / ranks
    latency = 50e-6 + 2 * (ranks - 1) * 2e-6 + 2 * (nodes - 1) * 9e-6
    return latency + 2 * (ranks - 1) / ranks * lane / 5e9 * (1 + 1 / ranks)


def test_a_ring_is_carried_to_other_group_sizes() -> None:
    """A truth of this form, seen among 2, 4 and 8, is met among 16 and among 3."""
    samples = [link_sample(ring(n, size), size, ranks=n) for n in (2, 4, 8) for size in SIZES]
    predictor = fitted(samples)
    (shape,) = predictor.laws.links[0].shapes
    assert shape.law.coefficients == pytest.approx((50e-6, 2e-6, 0, 2e-10, 2e-10), rel=1e-3)
    assert (shape.least_group, shape.most_group, shape.validation.folds) == (2, 8, 3)
    assert shape.validation.left_out == "group size"
    between = predictor.collective(LINK, "all_reduce", 3, 16 << 20)
    assert between.seconds == pytest.approx(ring(3, 16 << 20), rel=1e-3)
    assert between.extrapolating == ("all_reduce group 3, 2 and 4 measured",)
    beyond = predictor.collective(LINK, "all_reduce", 16, 16 << 20)
    assert beyond.seconds == pytest.approx(ring(16, 16 << 20), rel=1e-3)
    assert beyond.extrapolating == ("all_reduce group 16, 8 measured",)
    assert beyond.log_halfwidth == pytest.approx(between.log_halfwidth + CARRY_LOG_PER_DOUBLING)


def test_one_group_size_is_carried_by_the_law_of_its_class() -> None:
    predictor = fitted([link_sample(ring(4, size), size, ranks=4) for size in SIZES])
    assert predictor.laws.links[0].shapes == ()
    prediction = predictor.collective(LINK, "all_reduce", 16, 16 << 20)
    assert prediction.seconds == pytest.approx(ring(16, 16 << 20), rel=0.15)
    assert prediction.extrapolating == ("all_reduce group 16, 4 measured",)
    same_size = predictor.collective(LINK, "all_reduce", 4, 4 << 20)
    joint = joint_of(predictor.laws.links[0].tables, LINK.bandwidth_bytes_per_second)
    assert joint is not None
    halfwidths = dict(ONE_GROUP_LOG_HALFWIDTHS)
    one_size = 2 * halfwidths[joint.kind(16)]
    assert prediction.log_halfwidth == max(same_size.log_halfwidth, one_size)


def test_groups_over_several_nodes_have_tables_of_their_own() -> None:
    """16 ranks in 2 nodes are not 16 in 16; other numbers of nodes are carried by crossings."""
    shapes = ((2, 2), (16, 2), (32, 4), (8, 8), (4, 4))
    samples = [
        link_sample(ring(n, size, nodes), size, ranks=n, nodes=nodes)
        for n, nodes in shapes
        for size in SIZES
    ]
    predictor = fitted(samples)
    for n, nodes in shapes:
        found = predictor.collective(LINK, "all_reduce", n, SIZES[-1], nodes=nodes)
        assert found.seconds == ring(n, SIZES[-1], nodes)
        assert found.extrapolating == ()
    at_once = [
        link_sample(groups * curve(size), size, ranks=4, groups=groups)
        for groups in (1, 4)
        for size in SIZES
    ]
    for groups in (1, 4):
        found = fitted(at_once).collective(LINK, "all_reduce", 4, SIZES[2], groups=groups)
        assert found.seconds == groups * curve(SIZES[2])
    more = predictor.collective(LINK, "all_reduce", 128, 16 << 20, nodes=16)
    assert more.seconds == pytest.approx(ring(128, 16 << 20, 16), rel=2e-3)
    assert more.extrapolating[0] == "all_reduce group 128 in 16 nodes, 32 in 4 measured"


@REPEATABLE
@given(
    st.lists(st.sampled_from([2, 3, 4, 6, 8, 16]), min_size=1, max_size=4, unique=True),
    st.floats(0, 1e-4),
    st.floats(1e-11, 1e-8),
    st.integers(2, 128),
    st.floats(1, 1e10),
    st.floats(1, 100),
)
def test_carried_times_are_positive_and_never_fall_with_size(
    groups: list[int], step: float, per_byte: float, asked: int, size: float, larger: float
) -> None:
    samples = [
        link_sample(5e-5 + n * step + at * per_byte * (2 - 1 / n), at, ranks=n)
        for n in groups
        for at in SIZES[:4]
    ]
    predictor = fitted(samples)
    for operation in ("all_reduce", "reduce_scatter"):
        small = predictor.collective(LINK, operation, asked, size)
        large = predictor.collective(LINK, operation, asked, size * larger)
        assert 0 < small.seconds <= large.seconds * (1 + 1e-9)
        assert small.source == "measured"


def test_an_operation_not_measured_comes_from_its_relatives() -> None:
    predictor = fitted([link_sample(curve(size), size) for size in SIZES])
    half = predictor.collective(LINK, "reduce_scatter", 2, SIZES[2])
    # Half of the bytes, but a call's latency is not halved.
    assert curve(SIZES[2]) / 2 < half.seconds < curve(SIZES[2])
    large = predictor.collective(LINK, "reduce_scatter", 2, 64 * SIZES[-1])
    assert large.seconds == pytest.approx(curve(64 * SIZES[-1]) / 2, rel=1e-3)
    assert half.extrapolating == ("reduce_scatter not measured: from all_reduce",)
    assert half.log_halfwidth > LINK_LOG_HALFWIDTH
    gathers = [link_sample(curve(size), size, operation="all_gather") for size in SIZES]
    twice = fitted(gathers).collective(LINK, "all_reduce", 2, SIZES[2])
    assert curve(SIZES[2]) < twice.seconds < 2 * curve(SIZES[2])
    staged = [replace(s, backend="gloo") for s in gathers]
    found = fitted(staged).collective(
        replace(LINK, transport=Transport.HOST_STAGED), "all_reduce", 2, SIZES[2]
    )
    assert found.seconds == pytest.approx(2 * curve(SIZES[2]))
    sends = [link_sample(curve(size), size, operation="send_recv") for size in SIZES]
    steps = fitted(sends).collective(LINK, "all_reduce", 4, 1 << 20)
    assert steps.seconds == pytest.approx(6 * curve((1 << 20) / 4))
    assert steps.extrapolating == ("all_reduce not measured: 6 sends",)


def test_staged_links_without_samples_follow_their_figures() -> None:
    link = replace(LINK, samples=None, transport=Transport.HOST_STAGED)
    predictor = FittedPredictor.datasheet_only()
    alpha, beta = link.latency_seconds, 1 / link.bandwidth_bytes_per_second
    size, ranks = 1e8, 8
    reduce = predictor.collective(link, "all_reduce", ranks, size)
    assert reduce.seconds == pytest.approx(14 * alpha + 14 / 8 * size * beta)
    assert (reduce.source, reduce.log_halfwidth) == ("datasheet", LINK_LOG_HALFWIDTH)
    assert reduce.extrapolating == ()
    scatter = predictor.collective(link, "reduce_scatter", ranks, size)
    gather = predictor.collective(link, "all_gather", ranks, size)
    assert scatter.seconds + gather.seconds == pytest.approx(reduce.seconds)
    assert predictor.collective(link, "all_reduce", 1, size).seconds == 0
    law = predictor.send(link, size)
    assert law.wire_latency_seconds == alpha
    assert law.rendezvous_latency_seconds == 2 * alpha
    assert law.seconds_per_byte == beta


def rendezvous_samples(gap: float) -> list[LinkSample]:
    samples = []
    for size in SIZES:
        together = 10.3e-3 + size / 25e6
        samples.append(link_sample(together, size, operation="send_recv", backend="gloo"))
        samples.append(
            link_sample(together - gap, size, operation="send_recv_late", backend="gloo")
        )
    return samples


def test_sends_know_rendezvous_and_wire() -> None:
    """Figures of gloo over 200 Mbit/s and a 10.3 ms round trip: 10.3 ms together, 5.6 ms late."""
    staged = replace(LINK, transport=Transport.HOST_STAGED)
    predictor = fitted(rendezvous_samples(4.7e-3))
    for size in (4096, 1e6, 8 << 20):
        law = predictor.send(staged, size)
        assert law.source == "measured"
        assert law.rendezvous_latency_seconds == pytest.approx(10.3e-3)
        assert law.wire_latency_seconds == pytest.approx(5.6e-3)
        assert law.seconds_per_byte == pytest.approx(1 / 25e6)
        assert law.extrapolating == ()


@REPEATABLE
@given(
    st.lists(st.floats(1e-6, 10), min_size=6, max_size=6),
    st.lists(st.floats(1e-6, 10), min_size=6, max_size=6),
    st.floats(1, 1e9),
)
def test_a_send_law_meets_the_measured_time_with_no_negative_part(
    together: list[float], late: list[float], size: float
) -> None:
    samples = [
        link_sample(time, at, operation=operation)
        for operation, times in (("send_recv", together), ("send_recv_late", late))
        for at, time in zip(SIZES, times, strict=True)
    ]
    predictor = fitted(samples)
    law = predictor.send(LINK, size)
    assert 0 <= law.wire_latency_seconds <= law.rendezvous_latency_seconds
    assert law.seconds_per_byte >= 0
    table = next(t for t in predictor.laws.links[0].tables if t.operation == "send_recv")
    for at, time in zip(table.message_bytes, table.seconds, strict=True):
        exact = predictor.send(LINK, at)
        total = exact.rendezvous_latency_seconds + at * exact.seconds_per_byte
        assert total == pytest.approx(time)


def test_left_out_sizes_set_the_interval() -> None:
    samples = [link_sample(curve(4096 << k), 4096 << k) for k in range(14)]
    (law,) = fit_link_laws(samples)
    (table,) = law.tables
    assert table.validation.left_out == "message"
    assert table.validation.folds == 12
    assert 0 < table.log_halfwidth < 0.2
    (few,) = fit_link_laws(samples[:4])
    assert few.tables[0].log_halfwidth >= LINK_LOG_HALFWIDTH
    assert "too few" in few.tables[0].calibration


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"operation": "gossip"}, "operation is 'gossip'"),
        ({"median_seconds": -1.0}, "median_seconds is -1.0"),
        ({"message_bytes": 0}, "message_bytes is 0"),
        ({"group_size": 1}, "group_size is 1"),
    ],
)
def test_unusable_samples_are_named(change: dict[str, object], words: str) -> None:
    sample = replace(link_sample(1.0, 10), **change)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="link sample 1 of rail") as caught:
        fit_link_laws([sample])
    assert words in str(caught.value)
