"""Every plan trains the same model: its losses are those of one process."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from runtime_cases import CASES, CASES_NORM, EXPERTS, GPT, MIXED, SMOKE, Case
from runtime_ranks import main

from hetplan.cost.network.segments import TrafficClass
from hetplan.cost.traffic import ledger, links_between
from hetplan.plans.pieces import Places
from hetplan.runtime import gradients
from hetplan.runtime.data import SUCCESSORS
from hetplan.runtime.placement import place_ranks
from hetplan.runtime.single import reference_losses

# One process group trains all cases: keep its tests in one process of pytest-xdist too.
pytestmark = pytest.mark.xdist_group("runtime_losses")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on shared cores are slower than one for models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def clipped_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ranks do."""
    monkeypatch.setattr(gradients, "MAX_NORM", CASES_NORM)


Trained = Callable[[Case], dict[str, list]]
each_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in SMOKE else pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What rank 0 saw of a case; the ranks are started for the first one of its tier."""

    @cache
    def of_tier(smoke: bool) -> dict[str, dict[str, list]]:
        folder = tmp_path_factory.mktemp("ranks")
        run_ranks(partial(main, [case for case in CASES if (case in SMOKE) == smoke]), folder)
        return json.loads((folder / "0.json").read_text())

    return lambda case: of_tier(case in SMOKE)[case.name]


@each_case
def test_losses_are_those_of_one_process(case: Case, trained: Trained) -> None:
    expected = reference_losses(case.model, case.job, steps=case.steps, microbatch_size=4)
    found = trained(case)
    assert found["losses"] == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == case.steps  # or agreement would show nothing
    for seconds, busy, wait, reduction in found["ranks"]:
        assert 0 < busy < seconds
        assert wait >= 0
        # Medians of parts need not add up to the median of the whole; they are close to it.
        assert busy + wait + reduction < 1.5 * seconds


def test_the_loss_starts_at_ignorance_and_falls(trained: Trained) -> None:
    losses = trained(SMOKE[0])["losses"]
    assert losses[0] == pytest.approx(math.log(GPT.vocab_size), rel=0.02)
    entropy = -sum(part * math.log(part) for part in SUCCESSORS)
    assert entropy < losses[-1] < losses[0] - 0.5


MORE_OR_LESS = {
    # Recomputation stops once it has what the backward pass needs, before the layer's last sum.
    "unlike degrees, a split": {"tp"},
    # Copies of a matrix that is cut unlike at both ends need each other's parts more than once.
    "unlike degrees, a join, tied, clipped": {"embedding"},
    "interleaved, unlike degrees, tied, clipped": {"embedding"},
    # Parts of one length: the last one is filled up.
    "sharded over 3": {"dp"},
    # The ledger lets ranks of the same position talk; samples come from whoever has them.
    "one stage on two islands, unlike microbatches": {"pp"},
    "one stage on two islands, unlike tp, copied kv heads": {"pp", "dp", "embedding"},
    MIXED.name: {"dp", "ep"},
    # Where tokens go their router says; the ledger deals them out evenly.
    **{case.name: {"ep"} for case in EXPERTS if case.name != MIXED.name},
}
"""Traffic that is not the cost model's, by case: its ledger rounds unlike cuts."""


@each_case
def test_what_crosses_links_is_what_the_cost_model_counts(case: Case, trained: Trained) -> None:
    places, where = place_ranks(case.plan), Places(cluster=case.machines)
    found = defaultdict[tuple[str, str], float](float)
    for source, target, traffic, size in trained(case)["sent"]:
        ends = (np.array([places[rank].device]) for rank in (source, target))
        ((link, count),) = links_between(where, *ends)
        assert count == 1
        found[str(link), traffic] += size
    expected = {
        (str(each.link), each.traffic.value): each.bytes_per_step
        for each in ledger(case.plan, case.model, case.machines, case.job).entries
        if each.traffic is not TrafficClass.DATA
    }
    apart = MORE_OR_LESS.get(case.name, set())
    same, other = (
        {k: v for k, v in each.items() if k[1] not in apart} for each in (found, expected)
    )
    assert same == pytest.approx(other)
    for traffic in apart:
        totals = [sum(v for k, v in each.items() if k[1] == traffic) for each in (found, expected)]
        # Activations and gradients are the same bytes; only their way differs.
        assert totals[0] == pytest.approx(totals[1]) or traffic != "pp"
        assert 0.8 * totals[1] < totals[0] <= 2 * totals[1]
        assert found != expected
