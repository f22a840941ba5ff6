"""The search with gap 0 finds what trying every plan finds, and its bound is never above it."""

from __future__ import annotations

from collections import Counter

import pytest
from oracle_instances import AXES, FREE, axes_of, listed
from oracle_judge import Verdict, judge
from oracle_table import MIN_INSTANCES, every_pair, least_of, pairs_of
from random_cases import seeds

SAMPLE = 60
BLOCKS = 12


def _checked(numbers: list[int]) -> list[Verdict]:
    rows = listed()
    found = [judge(rows[number]) for number in numbers]
    faults = [f"{each.number}: {each.text}" for each in found if each.outcome == "FAULT"]
    assert not faults, "\n".join(faults)
    return found


@pytest.mark.parametrize("block", seeds(BLOCKS))
def test_search_equals_the_oracle(block: int) -> None:
    rows = listed()
    # Small ones: all of them are for `make oracle`.
    small = [row.number for row in rows if row.plans <= 400]
    chosen = small[:: len(small) // SAMPLE][:SAMPLE][block::BLOCKS]
    outcomes = Counter(each.outcome for each in _checked(chosen))
    assert outcomes["equal"] > 0


def test_every_pair_of_axes_is_on_together() -> None:
    rows = listed()
    assert [row.number for row in rows] == list(range(len(rows)))
    assert len(rows) >= MIN_INSTANCES
    assert len({(row.target, row.wanted, row.seed) for row in rows}) == len(rows)
    together = pairs_of([axes_of(row.instance()) for row in rows])
    few = {pair: together[pair] for pair in every_pair() if together[pair] < least_of(pair)}
    assert not few


def test_every_instance_is_small_and_pins_what_is_off() -> None:
    for row in listed():
        made = row.instance()
        assert 2 <= made.cluster.num_devices <= 6
        assert 3 <= made.model.num_layers <= 10
        kinds = {island.device.kind for island in made.cluster.islands}
        assert 2 <= len(kinds) <= 3
        off = set(FREE) - axes_of(made)
        pin = made.job.pin
        pinned = {"tp": pin.tp, "cp": pin.cp, "microbatch": pin.microbatch_size, "dp": pin.dp}
        wide = any(island.devices_per_node > 1 for island in made.cluster.islands)
        for name, value in pinned.items():
            if name in off and (name == "microbatch" or wide) and name in AXES:
                assert value is not None or name == "cp", (row.number, name)
