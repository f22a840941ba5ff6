"""Layouts under V schedules: where layers lie, what they keep, what is refused and was measured."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from cost_fakes import LinearPredictor, island, job, model

from hetplan.cluster.spec import Cluster, Link, Transport
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Component, Estimate
from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder
from hetplan.job.spec import Job, Precision, TrainerOptions
from hetplan.model.load import load_model
from hetplan.plans.check import check_plan
from hetplan.plans.layout import Layout, plan_of_layout
from hetplan.plans.plan import Plan
from hetplan.predict.datasheet import known_kinds
from hetplan.predict.fit import FittedPredictor, with_shipped

SMALL = model(num_layers=16)
ONE = Cluster(name="one", islands=(island("a"),))


def asked(target: str = "any", batch: int = 16, **more: object) -> Job:
    return replace(job(), target=target, global_batch_size=batch, **more)  # type: ignore[arg-type]


def laid_out(schedule: str, question: Job, pp: int = 4, **more: object) -> Plan:
    layout = Layout(pp=pp, dp=1, schedule=schedule, **more)  # type: ignore[arg-type]
    return plan_of_layout(layout, SMALL, ONE, question)


def priced(schedule: str, **more: object) -> Estimate:
    return estimate(laid_out(schedule, asked(), **more), SMALL, ONE, asked(), LinearPredictor())  # type: ignore[arg-type]


def test_the_first_stage_holds_both_ends_of_the_model() -> None:
    plan = laid_out("zbv", asked(), layers=(1, 2, 3, 1, 1, 2, 3, 3))
    ranges = [[(c.start, c.stop) for c in stage.chunks] for stage in plan.stages]
    assert ranges == [[(0, 2), (14, 18)], [(2, 4), (11, 14)], [(4, 7), (9, 11)], [(7, 8), (8, 9)]]
    assert check_plan(plan, SMALL, ONE, asked()) == ()


@pytest.mark.parametrize(
    ("schedule", "least", "most"),
    [("zbv", 1, 1), ("dualpipev", 9 / 8, 9 / 8), ("v-half", 5 / 8, 7 / 8), ("v-min", 1 / 2, 1 / 2)],
)
def test_v_schedules_keep_what_their_papers_say(schedule: str, least: float, most: float) -> None:
    """Of the first stage of 1F1B, without and with what waits for the gradients of the weights as
    if nothing of it were free after B (`test_controllable_memory` has the orders alone).
    """
    plain = priced("1f1b").stages[0].memory.activation_bytes
    kept = priced(schedule).stages[1].memory.activation_bytes  # neither embedding nor head
    assert 0.95 * least * plain <= kept <= 1.05 * most * plain


def test_a_tied_matrix_at_both_ends_of_a_v_is_one() -> None:
    tied = replace(SMALL, tied_embeddings=True)
    found = {}
    for name in ("zbv", "1f1b"):
        layout = Layout(pp=4, dp=1, schedule=name)
        plan = plan_of_layout(layout, tied, ONE, asked())
        assert bool(plan.tied_embedding_devices) == (name == "1f1b")
        found[name] = estimate(plan, tied, ONE, asked(), LinearPredictor())
    seconds = {c.component: c.seconds for c in found["zbv"].components}
    assert seconds.get(Component.EMBEDDING, 0.0) == 0.0
    parameters = [found[name].stages[0].memory.parameter_bytes for name in ("zbv", "1f1b")]
    assert parameters[0] == parameters[1] + 4 * SMALL.hidden_size  # one matrix, and the last norm


@pytest.mark.parametrize(
    ("schedule", "question", "more", "message"),
    [
        ("zbv", asked("megatron"), {}, r"not zbv \(target torchtitan and any\)"),
        ("v-min", asked("torchtitan"), {}, r"not v-min \(target any\)"),
        ("zbv", asked(), {"virtual_stages": 3}, "3 with zbv; V schedules have 2"),
        ("dualpipev", asked(batch=7), {}, "7; dualpipev needs two per stage, 8: use zbv"),
        ("zbv", asked(), {"pp": 10}, "10 pipeline stages of 2 chunks for 16 transformer layers"),
        (
            "zbv",
            asked("torchtitan", trainer=TrainerOptions(fused_elementwise=True)),
            {},
            "zbv with the job's trainer.fused_elementwise; target torchtitan cannot split",
        ),
    ],
)
def test_what_no_plan_has_is_refused_in_one_line(
    schedule: str, question: Job, more: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        laid_out(schedule, question, **more)
    assert len(error.value.faults) == 1


# ---- measured: tokens per second and device of Primus' schedules (AMD-AGI/Primus fd1eeabb,
# docs_deprecated/tech_blogs/primus_pipeline/primus_pipeline.md), micro batch 1; batch and sequence
# length are not stated, so only who is faster is compared, for any batch.

LLAMA = {"1f1b": 10057, "interleaved-1f1b": 10974, "zbv": 11347, "v-half": 10894, "v-min": 8897.2}
"""Llama 2 7B on 8 MI300X, pp 8; interleaved: 2 chunks."""
QWEN = {"zbv": 2952.7, "zb-h1": 2963.1, "interleaved-1f1b": 3024.5}
"""Qwen3 235B on 32 MI355X, pp 4, ep 8; interleaved: 4 chunks."""


def amd(kind: str, nodes: int) -> Cluster:
    whole = island("x", nodes=nodes, devices_per_node=8)
    # xGMI between two of a node; a NIC of 400 Gbit/s for each.
    near, far = (
        Link(bandwidth_bytes_per_second=b, latency_seconds=5e-6, transport=Transport.DEVICE_DIRECT)
        for b in (64e9, 50e9)
    )
    device = known_kinds()[kind]
    memory = device.memory_bytes
    whole = replace(whole, device=device, intra_node=near, inter_node=far, memory_bytes=memory)
    return Cluster(name="amd", islands=(whole,))


@cache
def tokens_per_second(name: str, where: Cluster, batch: int, schedule: str, **more: int) -> float:
    spec = load_model(shipped_folder("configs") / "models" / f"{name}.yaml")
    question = replace(asked(batch=batch), sequence_length=4096, precision=Precision.BFLOAT16)
    plan = plan_of_layout(Layout(schedule=schedule, **more), spec, where, question)  # type: ignore[arg-type]
    predictor = with_shipped(FittedPredictor.datasheet_only())
    return 1 / estimate(plan, spec, where, question, predictor).step_seconds


@pytest.mark.parametrize("batch", [32, 64, 128])
def test_llama_2_7b_is_faster_with_zbv_than_with_1f1b(batch: int) -> None:
    where = amd("amd-mi300x", 1)
    speed = {
        name: tokens_per_second("llama-2-7b", where, batch, name, pp=8, dp=1, virtual_stages=v)
        for name, v in (
            ("1f1b", 1),
            ("interleaved-1f1b", 2),
            ("zbv", 2),
            ("v-half", 2),
            ("v-min", 2),
        )
    }
    for name, measured in LLAMA.items():
        assert (speed[name] > speed["1f1b"]) == (measured > LLAMA["1f1b"]), (name, speed)


@pytest.mark.parametrize("batch", [128, 256])
def test_qwen3_235b_is_faster_interleaved_than_with_zero_bubble(batch: int) -> None:
    where = amd("amd-mi355x", 4)
    speed = {
        name: tokens_per_second(
            "qwen3-235b-a22b", where, batch, name, pp=4, dp=8, ep=8, virtual_stages=v
        )
        for name, v in (("zbv", 2), ("zb-h1", 1), ("interleaved-1f1b", 4))
    }
    assert max(speed, key=speed.__getitem__) == max(QWEN, key=QWEN.__getitem__)
