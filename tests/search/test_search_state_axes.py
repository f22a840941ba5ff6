"""Where the state of weights lies, and which modules are recomputed: as the search chooses them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_jobs import cluster, island, job, model

from hetplan.cluster.devices import HostInterface
from hetplan.cluster.spec import Cluster
from hetplan.errors import InfeasibleError
from hetplan.job.spec import Job, Pins, RecomputeModule, Sharding
from hetplan.predict.fit import FittedPredictor
from hetplan.proof.closed_form import ClosedForm
from hetplan.search.result import SearchResult
from hetplan.search.search import search
from hetplan.search.space.families import Families
from hetplan.search.table_maker import TableMaker

PREDICTOR = FittedPredictor.datasheet_only()


def small(gigabytes: float, host_gigabytes: float | None, nodes: int = 1) -> Cluster:
    """An island of two devices a node; None: what its hosts can keep is not known."""
    one = island("a", nodes=nodes, per_node=2, gigabytes=gigabytes)
    host = HostInterface(pcie_generation=4, lanes=16)
    size = None if host_gigabytes is None else host_gigabytes * 1e9
    return cluster(replace(one, device=replace(one.device, host=host), host_memory_bytes=size))


def found(where: Cluster, pin: Pins | None = None, target: str = "megatron") -> SearchResult:
    asked = replace(job(8), target=target, gap=0.0, pin=pin or Pins())
    return search(model(8), where, asked, PREDICTOR)


def test_an_optimizer_goes_to_host_memory_where_it_does_not_fit_and_hosts_have_room() -> None:
    assert found(small(16.0, 64.0)).plan.optimizer_offload == 0.0
    tight = 1.05
    with pytest.raises(InfeasibleError):
        found(small(tight, None))
    away = found(small(tight, 64.0))
    assert away.plan.optimizer_offload == 1.0
    assert away.estimate.fits
    memory = away.estimate.stages[0].memory
    assert 0 < memory.host_bytes <= (memory.host_available_bytes or 0)
    # Of a host with less than half of what it keeps there is no plan.
    with pytest.raises(InfeasibleError):
        found(small(tight, memory.host_bytes / 1e9))
    with pytest.raises(InfeasibleError):
        found(small(tight, 64.0), Pins(optimizer_offload=0.0))
    assert found(small(16.0, 64.0), Pins(optimizer_offload=0.5)).plan.optimizer_offload == 0.5


def _families(where: Cluster, asked: Job) -> Families:
    return Families(model=model(8), cluster=where, job=asked)


def test_bounds_count_the_update_of_the_host() -> None:
    where, asked = small(16.0, 64.0), replace(job(8), target="megatron")
    maker = TableMaker(model=model(8), cluster=where, job=asked, predictor=PREDICTOR)
    by_kind = {
        (f.samples, f.meshes, f.recompute, f.sharding, f.virtual_stages, bool(f.offload)): f
        for f in maker.families
    }
    pairs = [
        (family, by_kind[(*key[:-1], True)])
        for key, family in by_kind.items()
        if not key[-1] and (*key[:-1], True) in by_kind
    ]
    assert len(pairs) > 10
    longer = 0
    for kept, away in pairs:
        low, high = (maker.order_free(each).bound_seconds for each in (kept, away))
        assert low <= high
        longer += low < high
        form = ClosedForm.of(maker.stage_pricer, away)
        assert form.excludes(away, high * (1 - 1e-6))
    assert longer > 10


def test_parameters_are_split_in_one_stage_and_over_a_node_with_torchtitan() -> None:
    asked = replace(job(8), target="torchtitan")
    every = _families(small(16.0, None, nodes=2), asked).families()
    split = [family for family in every if family.sharding is Sharding.PARAMETERS]
    assert {family.sharing_ranks for family in split} == {0, 2}
    assert all(family.one_stage and family.virtual_stages == 1 for family in split)
    plan = found(small(16.0, None, 2), Pins(sharding=Sharding.PARAMETERS), "torchtitan").plan
    assert plan.sharding is Sharding.PARAMETERS
    assert len(plan.stages) == 1


@pytest.mark.parametrize(
    ("target", "unfused", "words"),
    [
        ("megatron", False, ["none", "mlp", "full"]),
        ("megatron", True, ["none", "core_attn", "core_attn+mlp", "full"]),
        ("any", False, ["none", "layernorm+moe_act", "layernorm+mlp", "full"]),
        ("torchtitan", False, ["none", "full"]),
    ],
)
def test_modules_are_recomputed_in_a_chain(target: str, unfused: bool, words: list[str]) -> None:
    asked = replace(job(8), target=target)
    if unfused:
        asked = replace(asked, trainer=replace(asked.trainer, fused_attention=False))
    choices = _families(small(16.0, None), asked).recompute
    assert [each.words for each in choices] == words


def test_pinned_modules_are_the_only_choice() -> None:
    pin = Pins(recompute_modules=(RecomputeModule.MLP,))
    stages = found(small(16.0, None), pin).plan.stages
    assert {stage.recompute.words for stage in stages} == {"mlp"}
