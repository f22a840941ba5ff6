"""Every rule is broken in turn: the faults name that rule and no other."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
from counted_steps import counted_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from one_pipeline import StageChoice, build_plan
from plans_mutations import MUTATIONS, Spot, with_pipeline
from plans_of_many import (
    Case,
    Want,
    legal_cases,
    pipeline_of,
    plain_case,
    small_cluster,
    small_island,
    small_job,
    small_model,
    two_pipelines,
)
from rule_names import rule_of

from hetplan.cost.schedules import warmup_depths
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.plans.assemble import assemble_plan
from hetplan.plans.check import check_plan
from hetplan.plans.chosen import Shape
from hetplan.plans.pieces import own_depth
from hetplan.plans.plan import (
    SCHEDULES,
    DeviceRange,
    LayerRange,
    OverlapSettings,
    Plan,
    Replica,
    Sharding,
    Stage,
)
from hetplan.plans.rules import Rule
from hetplan.plans.v_schedules import is_v


def rules_broken(case: Case, plan: Plan) -> set[Rule]:
    return {rule_of(fault) for fault in check_plan(plan, case.model, case.cluster, case.job)}


@cache
def random_cases() -> tuple[Case, ...]:
    """Random legal plans that all mutations share."""
    found: list[Case] = []

    @settings(derandomize=True, deadline=None, max_examples=50, database=None)
    @given(legal_cases())
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return tuple(found)


def test_random_plans_of_several_pipelines_are_legal() -> None:
    for case in random_cases():
        assert check_plan(case.plan, case.model, case.cluster, case.job) == ()
    assert {len(case.plan.pipelines) for case in random_cases()} == {1, 2, 3}


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_two_pipelines_that_are_cut_differently_are_legal(experts: bool, tied: bool) -> None:
    case = two_pipelines(experts=experts, tied=tied)
    assert check_plan(case.plan, case.model, case.cluster, case.job) == ()
    assert [each.num_microbatches for each in case.plan.pipelines] == [4, 2]
    assert [group.layers.start for group in case.plan.reduction_groups] == [0, 4, 5, 7]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_a_random_legal_plan_breaks_one_rule(name: str) -> None:
    rule, mutate = MUTATIONS[name]
    broken = 0
    for seed, case in enumerate(random_cases()):
        draw = random.Random(seed)
        p = draw.randrange(len(case.plan.pipelines))
        s = draw.randrange(len(case.plan.pipelines[p].stages))
        plan = mutate(Spot(case, p, s, draw))
        if plan is not None:
            broken += 1
            assert rules_broken(case, plan) == {rule}
    assert broken >= 3


# ---- rules that need a special plan


@pytest.mark.parametrize(
    ("devices", "changes", "rule"),
    [
        (range(2, 6), {"tp": 4}, Rule.TP_IN_NODE),
        (range(8, 12), {}, Rule.NODES_USABLE),
        ((0, 1, 12, 13), {}, Rule.ONE_ISLAND),
        (range(0, 4), {"cp": 2, "tp": 1}, None),
    ],
)
def test_devices_of_a_stage(devices: object, changes: dict[str, object], rule: Rule | None) -> None:
    case = plain_case()
    want = Want(
        devices=tuple(devices),  # type: ignore[call-overload]
        chunks=(LayerRange(start=0, stop=10),),
        tp=2,
        microbatch_size=2,
    )
    pipeline = pipeline_of(case.cluster, case.job, [replace(want, **changes)], 1)  # type: ignore[arg-type]
    count = 8 // (2 * pipeline.stages[0].replicas[0].dp)
    plan = assemble_plan(
        case.model, case.cluster, case.job, [replace(pipeline, num_microbatches=count)]
    )
    assert rules_broken(case, plan) == (set() if rule is None else {rule})


@pytest.mark.parametrize(
    ("length", "changes", "rule"),
    [
        (30, {"cp": 4, "tp": 1}, Rule.SEQUENCE),
        (34, {"tp": 4, "sequence_parallel": True}, Rule.SEQUENCE),
        (32, {"tp": 4, "sequence_parallel": True}, None),
    ],
)
def test_ranks_share_a_sequence_evenly(
    length: int, changes: dict[str, object], rule: Rule | None
) -> None:
    case = plain_case()
    job = replace(case.job, sequence_length=length)
    want = Want(devices=range(4), chunks=(LayerRange(start=0, stop=10),))
    pipeline = pipeline_of(case.cluster, job, [replace(want, **changes)], 8)  # type: ignore[arg-type]
    plan = assemble_plan(case.model, case.cluster, job, [pipeline])
    assert rules_broken(replace(case, job=job), plan) == (set() if rule is None else {rule})


@pytest.mark.parametrize(("ep", "etp", "words"), [(2, 4, ""), (1, 8, "etp 8"), (8, 1, "")])
def test_degrees_divide_experts(ep: int, etp: int, words: str) -> None:
    model = small_model(experts=True)
    run = model.layer_runs[0]
    narrow = replace(run.layer.mlp, expert_ffn_hidden_size=20)  # type: ignore[type-var]
    layer = replace(run.layer, mlp=narrow)
    model = replace(model, layer_runs=(replace(run, layer=layer),))
    cluster, job = small_cluster(small_island("a", 1, 8)), small_job(8)
    want = Want(devices=range(8), chunks=(LayerRange(start=0, stop=10),), ep=ep, etp=etp)
    plan = assemble_plan(model, cluster, job, [pipeline_of(cluster, job, [want], 1)])
    faults = check_plan(plan, model, cluster, job)
    assert [rule_of(fault) for fault in faults] == ([Rule.SLICES] if words else [])
    assert words in "".join(map(str, faults))


def test_a_link_that_the_cluster_lacks_is_named() -> None:
    case = plain_case()
    plan = case.plan
    first, second = plan.pipelines[0].stages
    devices = (DeviceRange(start=12, count=4),)
    moved = replace(second, replicas=(replace(second.replicas[0], devices=devices),))
    without = replace(case.cluster, links=())
    groups = (plan.reduction_groups[0], replace(plan.reduction_groups[1], members=devices))
    plan = replace(
        with_pipeline(plan, 0, replace(plan.pipelines[0], stages=(first, moved))),
        reduction_groups=groups,
        unused_devices=(DeviceRange(start=4, count=8),),
    )
    faults = check_plan(plan, case.model, without, case.job)
    assert [rule_of(fault) for fault in faults] == [Rule.BOUNDARIES]
    assert "no link between islands a and b" in str(faults[0])


# ---- depths, forms, size


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 12), st.integers(1, 4))
def test_depths_are_those_of_the_schedules(
    name: str, stages: int, count: int, virtual: int
) -> None:
    chunks = virtual if name in ("interleaved-1f1b", "zb-h1") else 1 + is_v(name)
    count += 2 * stages if name == "dualpipev" else 0
    own = tuple(own_depth(name, s, stages, count, chunks) for s in range(stages))
    assert own == warmup_depths(name, stages, count, chunks)


def test_depths_of_a_slip_in_the_count_are_found_at_once() -> None:
    assert own_depth("interleaved-1f1b", 0, 4, 10**15, 3) == 6 + 8 + 1
    assert own_depth("zbv", 0, 4, 10**15, 2) == 8


def test_older_forms_of_a_plan_are_read(tmp_path: Path) -> None:
    case = plain_case("megatron")
    data = json.loads(encode(case.plan, schema="hetplan.plan-value/1"))
    for name in ("sharding", "optimizer_offload", "overlap"):
        del data[name]
    for group in data["reduction_groups"]:
        del group["expert"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert decode(read_document(path), Plan, schema="hetplan.plan-value/1") == case.plan
    assert case.plan.sharding is Sharding.OPTIMIZER
    data["optimizer_shards"] = 1
    path.write_text(json.dumps(data))
    read = decode(read_document(path), Plan, schema="hetplan.plan-value/1")
    assert read.sharding is Sharding.NONE
    assert read.overlap == OverlapSettings()


def test_a_plan_for_131072_devices_takes_no_more_steps_to_check_than_one_for_16384() -> None:
    model = small_model(64)
    job = small_job(128 * 64, "megatron")
    choices = [StageChoice(island=name, transformer_layers=1) for name in "ab" for _ in range(32)]
    steps = []
    for nodes in (1024, 8192):
        cluster = small_cluster(small_island("a", nodes, 8), small_island("b", nodes, 8))
        degrees = Shape(tp=8, dp=nodes // 32, microbatch_size=1)
        plan = build_plan(model, cluster, job, choices, degrees)
        used = sum(r.num_devices for s in plan.pipelines[0].stages for r in s.replicas)
        assert used == 16 * nodes
        faults, counted = counted_steps(partial(check_plan, plan, model, cluster, job))
        assert faults == ()
        steps.append(counted)
    assert steps[1] < 1.1 * steps[0]


def test_replicas_of_one_stage_may_differ_for_target_any() -> None:
    case = plain_case()
    first = Stage(
        chunks=(LayerRange(start=0, stop=10),),
        replicas=(
            Replica(devices=(DeviceRange(start=0, count=2),), tp=2, microbatch_size=3),
            Replica(devices=(DeviceRange(start=2, count=1),), tp=1, microbatch_size=1),
        ),
        warmup_depth=1,
    )
    pipeline = replace(case.plan.pipelines[0], stages=(first,), boundaries=(), num_microbatches=2)
    plan = assemble_plan(case.model, case.cluster, case.job, [pipeline])
    assert rules_broken(case, plan) == set()
    assert plan.reduction_groups[0].degree == 2


def leaves(data: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Paths of all numbers, words and lists."""
    if isinstance(data, dict):
        return [leaf for key, value in data.items() for leaf in leaves(value, (*path, key))]
    found = [path] if path else []
    if isinstance(data, list):
        found += [leaf for at, value in enumerate(data) for leaf in leaves(value, (*path, at))]
    return found


def test_whatever_is_edited_in_a_plan_is_answered(tmp_path: Path) -> None:
    draw = random.Random(7)
    file = tmp_path / "plan.json"
    read = broken = 0
    for case in random_cases():
        text = encode(case.plan, schema="hetplan.plan-value/1")
        for _ in range(6):
            data = json.loads(text)
            for path in draw.sample(leaves(data), draw.choice([1, 1, 2, 4])):
                holder = data
                try:
                    for step in path[:-1]:
                        holder = holder[step]  # type: ignore[index]
                    value = holder[path[-1]]  # type: ignore[index]
                except (KeyError, IndexError, TypeError):
                    continue  # an edit before this one took it away
                if isinstance(value, list):
                    edit: object = draw.choice([[], value * 2, value[1:]])
                elif isinstance(value, str):
                    edit = draw.choice(["", "1f1b", "gpipe", "full", "native", "float32"])
                else:
                    edit = draw.choice([-1, 0, 1, 2, 3, 7, 16, 10**6, 10**15])
                holder[path[-1]] = edit  # type: ignore[index]
            file.write_text(json.dumps(data))
            try:
                plan = decode(read_document(file), Plan, schema="hetplan.plan-value/1")
            except InputError:
                continue
            read += 1
            faults = check_plan(plan, case.model, case.cluster, case.job)
            assert plan == case.plan or all(rule_of(fault) in Rule for fault in faults)
            broken += bool(faults)
    assert broken > read / 2 > 50
