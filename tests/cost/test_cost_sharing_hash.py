"""Collisions: by hand, by enumeration, by drawing, and the approximation against the exact law."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.cluster.spec import Link, Transport
from hetplan.cost.network import hash_collisions
from hetplan.cost.network.hash_collisions import collision_efficiency, fullest_path, link_collisions
from hetplan.errors import InputError


@pytest.mark.parametrize(
    ("flows", "paths"), [(1, 1), (1, 5), (4, 1), (3, 3), (5, 2), (6, 4), (4, 7)]
)
def test_the_fullest_path_is_that_of_all_assignments(flows, paths):
    seen = Counter(
        max(Counter(each).values()) for each in itertools.product(range(paths), repeat=flows)
    )
    found = dict(fullest_path(flows, paths))
    assert found == pytest.approx({most: n / paths**flows for most, n in seen.items()})


def test_the_approximation_is_within_a_hundredth_of_the_exact_law(monkeypatch):
    worst = 0.0
    for flows in (64, 256, 1024):
        for paths in (2, 3, 8, 64, 1024):
            exact = collision_efficiency.__wrapped__(flows, paths)
            with monkeypatch.context() as patch:
                patch.setattr(hash_collisions, "MAX_EXACT", 0)
                patch.setattr(
                    hash_collisions, "fullest_path", hash_collisions.fullest_path.__wrapped__
                )
                near = collision_efficiency.__wrapped__(flows, paths)
            worst = max(worst, abs(near - exact))
    assert 0 < worst < 0.006


def test_many_flows_take_little_time_and_go_on_where_the_exact_law_ends():
    before = collision_efficiency(hash_collisions.MAX_EXACT, 64)
    after = collision_efficiency(hash_collisions.MAX_EXACT + 64, 64)
    assert 0 < after - before < 0.01  # more flows per path are more even
    found = collision_efficiency(10_000_000, 64)
    # Largest of 64 normal numbers with mean 156,250 and its root as deviation: about 2.4 of them.
    assert found == pytest.approx(1 / (1 + 2.4 / math.sqrt(156_250)), abs=5e-4)


@given(flows=st.integers(1, 200), paths=st.integers(1, 200), ratio=st.floats(0.5, 8))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_laws_of_collisions(flows, paths, ratio):
    law = fullest_path(flows, paths)
    assert math.fsum(chance for _, chance in law) == pytest.approx(1)
    assert all(-(-flows // paths) <= most <= flows for most, _ in law)
    found = collision_efficiency(flows, paths, path_over_flow=ratio)
    assert 0 < found <= 1
    # As many paths as flows: more paths of the same speed collide less.
    if paths >= flows and ratio == 1.0:
        assert collision_efficiency(flows, 2 * paths) >= found


def test_a_link_has_collisions_where_it_has_equal_cost_paths():
    link = Link(
        bandwidth_bytes_per_second=5e10, latency_seconds=5e-6, transport=Transport.DEVICE_DIRECT
    )
    assert link_collisions(link, 8) == 1.0
    hashed = replace(link, equal_cost_paths=8)
    assert link_collisions(hashed, 8) == collision_efficiency(8, 8)
    # Four streams per device have a quarter of its speed each and spread better.
    streams = replace(hashed, streams=4)
    assert link_collisions(streams, 8) == collision_efficiency(32, 8, path_over_flow=4.0)
    assert link_collisions(streams, 8) > link_collisions(hashed, 8)


def test_impossible_counts_are_refused():
    for call in (
        lambda: collision_efficiency(0, 1),
        lambda: collision_efficiency(1, 1, path_over_flow=math.nan),
    ):
        with pytest.raises(InputError):
            call()
