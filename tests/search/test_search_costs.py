"""Spaces add up to what the plans of their families cost; rough bounds are below all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from random_cases import seeds
from search_costs_cases import (
    chosen,
    fits,
    random_slots,
    regions_cluster,
    unlike_model,
)
from search_jobs import job
from synthetic_plans import Row, step_of

from hetplan.cluster.spec import Cluster
from hetplan.cost.step_model import overlap
from hetplan.cost.step_model.pricer import Pricer, StepCost
from hetplan.job.spec import Job, TrainerOptions
from hetplan.job.trainer import trainer_settings
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import plan_of
from hetplan.plans.check import check_plan
from hetplan.predict.fit import fit_populations
from hetplan.search.space.allowed import allowed_cluster
from hetplan.search.space.families import Families
from hetplan.search.space.family import Family
from hetplan.search.space.optimizer_phase import filled
from hetplan.search.table_maker import TableMaker

PREDICTOR = fit_populations(())
EXACT = 1e-9


def question(seed: int, target: str, *, hides: bool = False) -> tuple[ModelSpec, Cluster, Job]:
    """A small job of this target; what the target can have, it has now and then."""
    rng = np.random.default_rng(seed)
    cluster = regions_cluster(rng, [0, 1, 0] if seed % 2 else [0, 0])
    forms = ("dense",) if target == "native" else ("dense", "windows", "experts")
    model = unlike_model(str(rng.choice(forms)), 8, tied=bool(rng.random() < 0.3))
    options = TrainerOptions()
    if target in ("megatron", "any") and rng.random() < 0.4:
        options = TrainerOptions(fused_attention=False)
    asked = replace(job(int(rng.choice([8, 16])), target=target), trainer=options)
    if hides:
        # Of 1,100 words are trained 1,152 with tp 1, 1,280 with tp 2, 1,536 with tp 4.
        model = replace(model, vocab_size=1100)
        beside = replace(options, overlap_grad_reduce=True, overlap_param_gather=rng.random() < 0.5)
        asked = replace(asked, trainer=beside)
    if rng.random() < 0.5:
        asked = replace(asked, gradient_clipping=target != "megatron")
    return model, cluster, asked


def drawn(rng: np.random.Generator, families: tuple[Family, ...], count: int) -> list[Family]:
    """Some families, those with the rarer degrees as likely as the others."""
    plain = [each for each in families if each.virtual_stages == 1]

    def rare(family: Family) -> bool:
        shape = family.meshes[-1].shapes[0]
        return shape.cp > 1 or shape.ep > 1 or family.early_sends

    groups = [each for each in ([f for f in plain if rare(f)], plain) if each]
    return [groups[k % len(groups)][int(rng.integers(len(groups[k % len(groups)])))]
            for k in range(count)]  # fmt: skip


def unlike_parts(cluster: Cluster, family: Family, slots: Row) -> bool:
    """Whether a stage has parts of unlike kinds or links, which may take turns at being slowest."""
    parts = [
        {(cluster.islands[i].device.kind, cluster.islands[i].intra_node) for i in mesh.islands}
        for mesh in (family.meshes[at] for at in slots.meshes)
    ]
    return any(len(each) > 1 for each in parts)


def holds(step: StepCost) -> bool:
    return all(use.total_bytes <= use.available_bytes for row in step.memory for use in row)


@pytest.mark.parametrize(
    "target",
    [
        "megatron",
        pytest.param("flagscale", marks=pytest.mark.slow),
        "torchtitan",
        "native",
        pytest.param("any", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seed", seeds(6))
def test_a_space_adds_up_to_what_the_plan_costs(target: str, seed: int) -> None:
    adds_up(question(seed, target), seed)


@pytest.mark.parametrize("target", ["flagscale", pytest.param("megatron", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", seeds(6))
def test_a_space_is_no_more_than_the_plan_costs_where_compute_hides_reductions(
    target: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that padding the vocabulary makes one bucket more of a small model's stage here and there.
    monkeypatch.setattr(overlap, "_BUCKET_PARAMETERS", 5e6)
    monkeypatch.setattr(overlap, "_BUCKET_PARAMETERS_PER_RANK", 0.0)
    adds_up(question(seed, target, hides=True), seed)


def adds_up(asked_question: tuple[ModelSpec, Cluster, Job], seed: int) -> None:
    model, cluster, asked = asked_question
    families = Families(model=model, cluster=allowed_cluster(cluster, asked), job=asked).families()
    maker = TableMaker(model=model, cluster=cluster, job=asked, predictor=PREDICTOR)
    pricer = Pricer(model, cluster, asked, PREDICTOR)
    rng = np.random.default_rng(1000 + seed)
    priced = 0
    for family in drawn(rng, families, 8):
        space, order_free = maker.space(family), maker.order_free(family)
        crossing = maker.crossing_bound(family)
        for _ in range(4):
            slots = random_slots(rng, space)
            if not np.isfinite(space.tied[slots.meshes[0], slots.meshes[-1]]):
                continue
            plan = plan_of(model, cluster, asked, chosen(family, space, cluster, slots))
            assert check_plan(plan, model, cluster, asked) == ()
            step = pricer.step(plan)
            assert holds(step) is fits(space, slots), (family, slots)
            if not fits(space, slots):
                continue
            mine = step_of(space, slots)
            assert order_free.bound_seconds <= crossing <= step.step_seconds
            assert mine <= step.step_seconds * (1 + EXACT)
            assert (
                maker.evaluator.seconds(chosen(family, space, cluster, slots)) == step.step_seconds
            )
            hides = trainer_settings(asked).overlap_grad_reduce
            if maker.exact(family) or not (hides or unlike_parts(cluster, family, slots)):
                assert mine == pytest.approx(step.step_seconds, rel=EXACT), (family, slots)
                priced += 1
    assert priced or trainer_settings(asked).overlap_grad_reduce


def test_a_law_is_read_off_where_it_is_straight_and_asked_where_it_bends() -> None:
    values = np.cumsum(np.random.default_rng(1).uniform(0.5, 2.0, 400))

    def asked(law):  # type: ignore[no-untyped-def]
        count = 0

        def counted(k: int) -> float:
            nonlocal count
            count += 1
            return float(law(values[k]))

        found = filled(values, counted)
        np.testing.assert_allclose(found, [law(each) for each in values], rtol=1e-11)
        return count

    assert asked(lambda x: 3.0 + 2.0 * x) < 10
    kinked = asked(lambda x: min(3.0 + 2.0 * x, 60.0 + 0.7 * x, 150.0 + 0.2 * x))
    assert kinked < 60
    assert asked(np.sqrt) == values.size
    assert asked(lambda x: 1.0 if x < 300 else 1.0 + x - 300) < 60
    assert asked(lambda x: 5.0) < 10
