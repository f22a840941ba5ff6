"""Hosts of an elastic run: which are used, when they are used again, and when it grows for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetplan.launchers.elastic import (
    MAX_DOUBLINGS,
    HostBook,
    mutually_reachable,
)


@given(
    names=st.lists(st.sampled_from("abcdefgh"), unique=True),
    missing=st.sets(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh"))),
    silent=st.sets(st.sampled_from("abcdefgh")),
)
def test_joined_hosts_reach_each_other_and_none_is_left_out_for_nothing(
    names: list[str], missing: set[tuple[str, str]], silent: set[str]
) -> None:
    reaches = {
        one: {two for two in names if (one, two) not in missing}
        for one in names
        if one not in silent
    }
    found = mutually_reachable(names, reaches)
    assert list(found) == [name for name in names if name in found]
    for one in found:
        for two in found:
            assert one == two or two in reaches[one]
    if not missing:
        assert set(found) == set(names) - silent
    for other in set(names) - set(found) - silent:
        # Whoever is left out lacks somebody that answered.
        assert any(
            two != other and (two not in reaches[other] or other not in reaches[two])
            for two in reaches
        )


def test_a_region_that_is_cut_off_keeps_the_larger_part() -> None:
    north, south = ("n1", "n2", "n3"), ("s1", "s2")
    reaches = {one: set(side) for side in (north, south) for one in side}
    assert mutually_reachable((*south, *north), reaches) == north


def test_answers_needed_double_up_to_a_limit() -> None:
    book = HostBook(("a", "b"), answers_needed=3)
    needed = []
    for _ in range(MAX_DOUBLINGS + 3):
        book.leave_out(("a",))
        needed.append(book.needed("a"))
        for _ in range(needed[-1] - 1):
            assert book.record_answers(("a",), ("a",)) == ()
        assert book.record_answers(("a",), ("a",)) == ("a",)
    assert needed == [3, 6, 12, 24, 48, 96, 192, 192, 192]


def test_nobody_is_left_out_for_a_link_between_two_hosts() -> None:
    book = HostBook(("a", "b", "c"), answers_needed=3)
    for _ in range(5):
        assert book.blame(("a", "b")) == ""
    assert book.usable == ("a", "b", "c")
