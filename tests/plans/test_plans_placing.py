"""Stages of any sizes get devices of their own, inside one node or in whole ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetplan.plans.assemble import positions


@given(st.lists(st.sampled_from([1, 2, 4, 8, 16, 24]), max_size=12), st.integers(1, 8))
def test_sizes_that_divide_each_other_fit_whenever_they_are_no_more_than_there_are(
    sizes: list[int], nodes: int
) -> None:
    # Of 24 and 16 each is whole nodes; all others divide 8.
    found = positions(sizes, 8, nodes)
    assert (found is not None) == (sum(sizes) <= 8 * nodes)
    check_positions(sizes, found, 8, nodes)


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12, 24]), max_size=9), st.integers(1, 4))
def test_other_sizes_stay_in_their_nodes(sizes: list[int], nodes: int) -> None:
    check_positions(sizes, positions(sizes, 12, nodes), 12, nodes)


def check_positions(
    sizes: list[int], found: tuple[int, ...] | None, per_node: int, nodes: int
) -> None:
    if found is None:
        return
    taken = [
        at for start, size in zip(found, sizes, strict=True) for at in range(start, start + size)
    ]
    assert len(set(taken)) == len(taken)
    assert all(0 <= at < per_node * nodes for at in taken)
    for start, size in zip(found, sizes, strict=True):
        one_node = start // per_node == (start + size - 1) // per_node
        assert one_node or (start % per_node == 0 and size % per_node == 0)
