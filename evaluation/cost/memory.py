"""The memory formula against what other people's runs allocated.

Two publications, read from the folder of reference data (runs/*.csv):

    SimuMax v1.2, B200    22 runs, largest allocated GiB: Llama-3 70B of 12 layers with tp, pp and
                          cp, DeepSeek-V2 of 4 layers with ep. No number is fitted: Megatron-LM's
                          habits with the fused loss, and context parallelism by all-to-all (its
                          unit data have whole sequences and heads / (tp cp)).
    Sailor, GH200, RTX    18 runs of OPT-350M, unequal layers per stage. What is published is not
                          told apart from driver and communication library: one constant per kind
                          of cluster, the weighted median of the other runs' residuals (each row is
                          judged by a constant from the rows without it, and without its twins: rows
                          of equal layout).

Sailor's runs on RTX cards use less than their float32 activations alone would: they are read as
recomputing (the publication does not say); the one of three stages, marked suspect in the data, is
listed and kept out of the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas

from evaluation.accuracy.rows import SUSPECT_MARK, RunRow, model_of, read_table
from evaluation.output import WORDS, Section
from hetplan.cost.memory.device import device_memory
from hetplan.cost.memory.values import MEGATRON, Loss, MemoryLayout, TrainerMemory
from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange, Recompute, RecomputeGranularity, Sharding
from hetplan.units import format_bytes

GIBIBYTE = 2**30
SIMUMAX_FILE = Path("runs") / "simumax_b200.csv"
SAILOR_FILE = Path("runs") / "sailor_end_to_end.csv"

SIMUMAX_TRAINER = replace(MEGATRON, loss=Loss.IN_PLACE, context_exchange=True)
SAILOR_TRAINER = TrainerMemory(
    gradient_bytes=None,
    master_bytes=0,
    loss=Loss.TORCH,
    gated_columns=4.0,
    plain_columns=1.0,  # OPT's ReLU (arXiv 2205.01068)
    norm_statistics=True,
    fused_attention=False,
    fused_weight_gradients=False,
    placeholder_gradients=False,
    frees_as_it_goes=True,
    keeps_output=True,  # DeepSpeed's pipeline engine keeps a stage's outputs in its buffers
    receive_buffers=False,
    update_bytes=0.0,
)


def memory_rows(reference: Path) -> pandas.DataFrame:
    """Every run of the two files; an InputError where one is missing or has a row that is wrong."""
    simumax = _read(reference / SIMUMAX_FILE, _simumax_row)
    simumax["constant_bytes"] = 0.0
    groups = [simumax]
    for _, group in _read(reference / SAILOR_FILE, _sailor_row).groupby("group", sort=False):
        counted = group[~group["suspect"]]
        own = [
            _constant(counted[counted["predicted_bytes"] != predicted])
            for predicted in group["predicted_bytes"]
        ]
        predicted = group["predicted_bytes"] + own
        groups.append(group.assign(predicted_bytes=predicted, constant_bytes=_constant(counted)))
    found = pandas.concat(groups, ignore_index=True)
    found["error"] = found["predicted_bytes"] / found["measured_bytes"] - 1.0
    return found


def memory_errors(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Absolute errors of every group, without the suspect rows.

    `constant_bytes`: beside the formula, from all rows of the group; 0: nothing was fitted.
    """
    found = rows.assign(error=rows["error"].abs().where(~rows["suspect"]))
    return (
        found.groupby("group", sort=False)
        .agg(
            rows=("error", "count"),
            suspect_rows=("suspect", "sum"),
            mean_error=("error", "mean"),
            worst_error=("error", "max"),
            constant_bytes=("constant_bytes", "first"),
        )
        .reset_index()
    )


def memory_section(reference: Path) -> Section:
    """The table of `memory_errors`."""
    return Section(
        name="memory",
        title="Memory against published runs",
        frame=memory_errors(memory_rows(reference)),
        columns={
            "runs": ("group", WORDS),
            "rows": ("rows", "{:d}"),
            "suspect": ("suspect_rows", "{:d}"),
            "mean error": ("mean_error", "{:.2%}"),
            "worst": ("worst_error", "{:.2%}"),
            "constant": ("constant_bytes", lambda size: format_bytes(size) if size else "none"),
        },
    )


def _read(path: Path, make: Callable[[RunRow], dict[str, Any]]) -> pandas.DataFrame:
    if not path.is_file():
        raise InputError(f"{path} is not there; name the folder of reference data")
    rows = []
    for row in read_table(path):
        try:
            if row.faults or row.peak_memory_gib is None:
                raise InputError("; ".join(row.faults) or "no peak_mem_gib")
            measured = row.peak_memory_gib * GIBIBYTE
            suspect = SUSPECT_MARK in row.other
            rows.append({**make(row), "measured_bytes": measured, "suspect": suspect})
        except (InputError, TypeError, ValueError, ZeroDivisionError, KeyError) as fault:
            raise InputError(f"{path}, line {row.line}: {fault}") from fault
    if not rows:
        raise InputError(f"{path} has no rows")
    return pandas.DataFrame(rows)


def _constant(rows: pandas.DataFrame) -> float:
    """The constant with the least mean relative error: a median weighted by 1 / measured."""
    residuals = (rows["measured_bytes"] - rows["predicted_bytes"]).sort_values()
    weights = (1.0 / rows["measured_bytes"])[residuals.index].cumsum()
    enough = residuals[weights >= weights.max() / 2]
    return float(enough.iloc[0]) if len(enough) else 0.0


def _simumax_row(row: RunRow) -> dict[str, Any]:
    model = model_of(row).model
    tp, pp, cp, ep, dp, size = _degrees(row)
    per_stage = model.num_layers // pp
    ends = [0, *(1 + per_stage * (stage + 1) for stage in range(pp - 1)), model.num_layers + 2]
    job = _job(row, Precision.BFLOAT16)
    layouts = [
        MemoryLayout(
            chunks=(LayerRange(start=ends[stage], stop=ends[stage + 1]),),
            tp=tp,
            cp=cp,
            ep=ep,
            dp=dp,
            microbatch_size=size,
            num_microbatches=job.global_batch_size // (dp * size),
            stage=stage,
            num_stages=pp,
            sequence_parallel=tp > 1,
            sharding=Sharding.OPTIMIZER,
            shards=dp * cp,
        )
        for stage in range(pp)
    ]
    experts = row.model.startswith("deepseekv2")
    return {
        "group": "B200, experts" if experts else "B200, dense",
        "predicted_bytes": _largest(model, job, layouts, SIMUMAX_TRAINER),
    }


def _sailor_row(row: RunRow) -> dict[str, Any]:
    counts = [int(each) for each in row.settings["layers_per_stage"].split("/")]
    tp, _, _, _, dp, size = _degrees(row)
    # With the vocabulary that Megatron-LM pads to 128 tp.
    padded = -(-(row.vocab or 0) // (128 * tp)) * 128 * tp
    model, job = replace(model_of(row).model, vocab_size=padded), _job(row, Precision.FLOAT32)
    rtx = "RTX" in row.gpu
    recompute = Recompute(granularity=RecomputeGranularity.FULL) if rtx else Recompute()
    layouts = [
        MemoryLayout(
            chunks=(LayerRange(start=sum(counts[:stage]), stop=sum(counts[: stage + 1])),),
            tp=tp,
            etp=tp,
            dp=dp,
            microbatch_size=size,
            num_microbatches=job.global_batch_size // (dp * size),
            stage=stage,
            num_stages=len(counts),
            recompute=recompute,
        )
        for stage in range(len(counts))
    ]
    return {
        "group": "RTX" if rtx else "GH200",
        "predicted_bytes": _largest(model, job, layouts, SAILOR_TRAINER),
    }


def _degrees(row: RunRow) -> tuple[int, int, int, int, int, int]:
    """tp, pp, cp, ep, dp and the microbatch size; what the row leaves out counts as 1."""
    return (
        row.tp or 1, row.pp or 1, row.cp or 1, row.ep or 1, row.dp or 1, row.micro_batch or 1,
    )  # fmt: skip


def _job(row: RunRow, precision: Precision) -> Job:
    return Job(
        name="measured",
        global_batch_size=row.global_batch or 0,
        sequence_length=row.seq or 0,
        precision=precision,
        optimizer=Optimizer.ADAMW,
        target="megatron",
    )


def _largest(
    model: ModelSpec, job: Job, layouts: Sequence[MemoryLayout], habits: TrainerMemory
) -> float:
    return max(
        device_memory(model, job, layout, 0.0, habits=habits).total_bytes for layout in layouts
    )
