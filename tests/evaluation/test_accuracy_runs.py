"""A row of a table becomes the model, cluster, job and plan that were run, and a prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_tables import write_runs

from evaluation.accuracy.calibration import run_of
from evaluation.accuracy.clusters import (
    cluster_of,
    device_kind_of,
    kind_names,
    network_of,
)
from evaluation.accuracy.plans import plan_of
from evaluation.accuracy.rows import RunRow, model_of, read_runs
from hetplan.cluster.catalogue import load_catalogue
from hetplan.errors import InputError
from hetplan.job.spec import ExpertDispatcher, Precision
from hetplan.model.operators import FORWARD, WITH_WEIGHTS, layer_operators, operator_flops
from hetplan.model.spec import LayerKind
from hetplan.plans.plan import OverlapSettings, RecomputeGranularity, Sharding, expand


@pytest.fixture
def row(tmp_path: Path) -> RunRow:
    return read_runs(write_runs(tmp_path, {}))[0][0]


# ---- models


@pytest.mark.parametrize(
    ("sizes", "billions", "active"),
    [
        # Published sizes of these models, and how much of them a token meets.
        ({"model": "LLAMA3_70B", "layers": 80, "hidden": 8192, "ffn_hidden": 28672, "heads": 64,
          "kv_heads": 8, "vocab": 128256}, 70.6, 70.6),
        ({"model": "Qwen3_235B_a22B", "layers": 94, "hidden": 4096, "ffn_hidden": 12288,
          "heads": 64, "kv_heads": 4, "vocab": 151936, "num_experts": 128}, 235.1, 22.2),
        ({"model": "mixtral-8x7b", "layers": 32, "hidden": 4096, "ffn_hidden": 14336, "heads": 32,
          "kv_heads": 8, "vocab": 32000, "num_experts": 8}, 46.7, 12.9),
        ({"model": "deepseekv2", "layers": 60, "hidden": 5120, "ffn_hidden": 12288, "heads": 128,
          "kv_heads": 128, "vocab": 102400, "num_experts": 160}, 235.7, 21.4),
        ({"model": "deepseekv3", "layers": 61, "hidden": 7168, "ffn_hidden": 18432, "heads": 128,
          "kv_heads": 128, "vocab": 129280, "num_experts": 256}, 671.0, 37.6),
        ({"model": "qwen2.5-7b", "layers": 28, "hidden": 3584, "ffn_hidden": 18944, "heads": 28,
          "kv_heads": 4, "vocab": 152064}, 7.6, 7.6),
    ],
)  # fmt: skip
def test_parameter_counts_are_the_published_ones(
    row: RunRow, sizes: dict[str, object], billions: float, active: float
) -> None:
    model = model_of(replace(row, **sizes))[0]  # type: ignore[arg-type]
    assert model.parameter_count / 1e9 == pytest.approx(billions, rel=0.005)
    # The operators' products, two operations per weight and token, and the table of the embedding.
    met = model.vocab_size * model.hidden_size
    for position, kind in enumerate(model.layers):
        layer = model.layer_at(position) if kind is LayerKind.TRANSFORMER else None
        found = layer_operators(model, kind, layer, microbatch_size=1, sequence_length=1024)
        products = (op for op in found if op.operator in WITH_WEIGHTS)
        met += sum(operator_flops(op, FORWARD) for op in products) / 2 / 1024
    assert met / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"heads": None}, "heads"),
        ({"model": "foo-moe", "num_experts": 8}, "no known family"),
        ({"model": "gpt-moe", "num_experts": 8}, "dense family"),
    ],
)
def test_models_that_a_row_does_not_give(
    row: RunRow, changes: dict[str, object], word: str
) -> None:
    with pytest.raises(InputError, match=word):
        model_of(replace(row, **changes))  # type: ignore[arg-type]


# ---- devices and clusters


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("A100-80GB-SXM (multi: 512-GPU cluster)", "nvidia-a100-80gb-sxm"),
        ("GH-96", "nvidia-gh200-96gb"),
        ("H100", "nvidia-h100-80gb-sxm"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-sxm"),
        *((label, "") for label in ("XPU-9", "A", "nvidia")),
    ],
)
def test_labels_mean_kinds(label: str, kind: str) -> None:
    (name,) = kind_names(label)
    if kind:
        assert device_kind_of(name, load_catalogue()).kind == kind
    else:
        with pytest.raises(InputError, match="no kind of the catalogue"):
            device_kind_of(name, load_catalogue())


def test_notes_on_networks_are_read(row: RunRow) -> None:
    for note, gigabits in (
        ("8x 25 GB/s", 8 * 200),
        ("3.2 Tb/s per node", 8 * 400),
        ("3200 Gbps EFA", 8 * 400),
        ("50 GB/s per GPU", 8 * 400),
        ("NDR InfiniBand", 8 * 400),
        ("4x200Gbps RoCE", 4 * 200),
        ("Frontier Slingshot", 8 * 400),
    ):
        found = network_of(replace(row, gpu="H100", inter_bw_note=note))
        assert found is not None
        whole = found.nics * found.bandwidth_bytes_per_second
        assert whole == pytest.approx(gigabits * 1e9 / 8), note


def test_a_network_that_is_not_usual_is_not_made_up(row: RunRow) -> None:
    with pytest.raises(InputError, match="network between the nodes is not known"):
        cluster_of(replace(row, gpu="RTX-3090", inter_bw_note="fast"), ())
    alone = cluster_of(replace(row, gpu="RTX-3090", inter_bw_note="", gpus=8, dp=2), ())
    assert alone.islands[0].nodes == 1


# ---- plans


def plan(row: RunRow):  # type: ignore[no-untyped-def]
    return plan_of(row, model_of(row)[0], cluster_of(row, ()))


def test_the_plan_is_megatrons(row: RunRow) -> None:
    found = plan(row)
    (pipeline,) = found.plan.pipelines
    first, last = pipeline.stages
    assert pipeline.num_microbatches == 8
    assert [(c.start, c.stop) for s in pipeline.stages for c in s.chunks] == [(0, 3), (3, 6)]
    assert expand(first.replicas[0].devices) == tuple(range(8))
    assert expand(last.replicas[0].devices) == tuple(range(8, 16))
    assert first.recompute.granularity is RecomputeGranularity.FULL
    assert found.plan.sharding is Sharding.NONE
    assert found.job.precision is Precision.FLOAT16
    assert found.job.target == "megatron"
    assert found.notes == ()


def test_uneven_layers_interleaving_and_sharding(row: RunRow) -> None:
    for changes, layers in (
        ({"layers": 5}, [4, 3]),  # 5 layers, embedding and head, in 2 stages
        ({"other": "layers_per_stage=2,4; x=1"}, [2, 4]),
        ({"other": "layers_per_stage=1-3"}, [2, 4]),  # embedding and head not counted
    ):
        uneven = plan(replace(row, **changes))
        assert [s.num_layers for s in uneven.plan.pipelines[0].stages] == layers
        assert any("as even as" in note for note in uneven.notes) == ("layers" in changes)
    virtual = plan(replace(row, layers=8, vpp=2, dist_opt=Sharding.OPTIMIZER, gpus=32, pp=4))
    (pipeline,) = virtual.plan.pipelines
    assert pipeline.schedule.virtual_stages == 2
    assert len(pipeline.stages[0].chunks) == 2
    assert (virtual.plan.sharding, virtual.plan.optimizer_shards) == (Sharding.OPTIMIZER, 4)
    hybrid = replace(row, dist_opt=Sharding.PARAMETERS, within_node=True, gpus=32, pp=1, dp=None)
    found = plan(hybrid).plan
    assert found.optimizer_shards == (row.gpus_per_node or 0) // (row.tp or 1)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": "FP6"}, "no rates"),
        ({"dtype": "FP8"}, "a100-80gb-sxm has no float8 rate"),
        ({"dtype": "FP8", "source": "nemo-bridge-LoRA Performance"}, "weights are frozen"),
        ({"dtype": ""}, "does not say dtype"),
        ({"global_batch": 33}, "multiple"),
        ({"dp": 2}, "devices"),
        ({"layers": 1, "vpp": 4}, "too few"),
        ({"faults": ("tp is '2x', not a whole number",)}, "tp is '2x'"),
        ({"other": "layers_per_stage=1/2"}, "are not the 6 layers"),
        ({"gpu": "A100-40+V100-16"}, "A100-40"),
        ({"gpus": 12, "dp": 3, "global_batch": 30}, "whole nodes"),
        ({"step_seconds": None}, "step time"),
    ],
)
def test_rows_that_cannot_be_predicted_say_why(
    row: RunRow, changes: dict[str, object], word: str
) -> None:
    with pytest.raises(InputError, match=word):
        run_of(replace(row, **changes), (), ())  # type: ignore[arg-type]


NEMO = {
    "source": "nemo-bridge-pretrain",
    "gpu": "B200",
    "seq_parallel": None,
    "dist_opt": Sharding.OPTIMIZER,
}


def test_nemos_runs_overlap_as_its_recipes_do(row: RunRow) -> None:
    nemo = replace(row, **NEMO, dtype="MXFP8", recompute="", vpp=2, layers=8)  # type: ignore[arg-type]
    found = plan(nemo).plan
    assert found.overlap == OverlapSettings(
        reduction=True, gathering=True, tensor_parallel=True, send=True
    )
    assert all(r.sequence_parallel for s in found.pipelines[0].stages for r in s.replicas)
    assert found.sharding is Sharding.OPTIMIZER
    four = plan(replace(nemo, dtype="NVFP4")).plan
    assert four.overlap == replace(found.overlap, tensor_parallel=False)
    large = replace(nemo, model="Qwen3_235B_a22B", hidden=4096, heads=64, num_experts=128, ep=2)
    for gpu, ref, dispatcher, beside in (
        ("H100", "25.11 NeMo Container", ExpertDispatcher.ALLTOALL, True),
        ("B200", "26.04 NeMo Container", ExpertDispatcher.ALLTOALL, False),
        ("GB200", "26.04.01 NeMo Container", ExpertDispatcher.DEEPEP, False),
        ("GB200", "26.06 NeMo Container", ExpertDispatcher.DEEPEP, True),
    ):
        dtype = "FP8" if gpu == "H100" else "MXFP8"  # which no H100 has
        found = plan(replace(large, gpu=gpu, source_ref=ref, inter_bw_note="NDR", dtype=dtype))
        assert found.job.trainer.expert_dispatcher is dispatcher
        assert found.plan.overlap.expert_parallel is beside, gpu
    alone = replace(nemo, tp=1, pp=1, dp=16, vpp=None, other="tokens/s/GPU=1; FSDP=64 (0); x=")
    found = plan(alone).plan
    assert found.overlap == OverlapSettings(reduction=True, gathering=True)
    assert found.sharding is Sharding.PARAMETERS
    assert plan(replace(alone, other="FSDP=0")).plan.sharding is Sharding.OPTIMIZER
    assert plan(row).plan.overlap == OverlapSettings()
