"""Planted faults on emulated hosts: a slow host is named, a clean run accuses nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.faults import CLEAN, FAULTS, SLOW_HOST, faults, trial_of
from hetplan.emulation.tools import missing


def test_trials_are_drawn_from_their_number() -> None:
    trials = [trial_of(5, number) for number in range(16)]
    assert [each.fault for each in trials[1::2]] == [CLEAN] * 8
    assert [each.fault for each in trials[::2]] == [*FAULTS] * 2
    assert trials == [trial_of(5, number) for number in range(16)]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.xdist_group("emulation")
@pytest.mark.skipif(bool(missing()), reason=f"cannot emulate here: {'; '.join(missing())}")
def test_a_slow_host_is_named_and_a_clean_run_accuses_nobody(tmp_path: Path) -> None:
    found = faults(1, 0, tmp_path, lambda line: None).document()
    planted, clean = found["runs"]
    assert (planted["fault"], planted["right"]) == (SLOW_HOST, True), planted
    assert (clean["fault"], clean["right"]) == (CLEAN, True), clean
