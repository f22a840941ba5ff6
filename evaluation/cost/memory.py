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
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.accuracy.rows import RunRow, model_of, read_table
from hetplan.cost.memory.device import device_memory
from hetplan.cost.memory.values import MEGATRON, Loss, MemoryLayout, TrainerMemory
from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import LayerRange, Recompute, RecomputeGranularity, Sharding

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """One measured run."""

    source: str
    group: str
    layout: str
    """Degrees, sizes and layers per stage, in words."""
    measured_bytes: float
    predicted_bytes: float
    suspect: bool = False
    """Marked so in the data; not in the group's mean."""

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryErrors:
    """All rows of a group."""

    group: str
    rows: int
    """Without the suspect ones."""
    suspect_rows: int
    mean_error: float
    """Of the absolute errors, as the next."""
    worst_error: float
    constant_bytes: float
    """Beside the formula, from all rows of the group; 0: nothing was fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccuracy:
    """The whole benchmark."""

    rows: tuple[MemoryRow, ...]
    groups: tuple[MemoryErrors, ...]


def memory_accuracy(reference: Path) -> MemoryAccuracy:
    """Every run of the two files; an InputError where one is missing or has a row that is wrong."""
    simumax = _rows(reference / SIMUMAX_FILE, _simumax_row)
    rows = list(simumax)
    groups = [_errors(part, 0.0) for part in _by_group(simumax)]
    for part in _by_group(_rows(reference / SAILOR_FILE, _sailor_row)):
        whole = [each for each in part if not each.suspect]
        with_constant = [_with_constant(each, whole) for each in part]
        rows += with_constant
        groups.append(_errors(with_constant, _constant(whole)))
    return MemoryAccuracy(rows=tuple(rows), groups=tuple(groups))


def _rows(path: Path, make: Callable[[RunRow], MemoryRow]) -> list[MemoryRow]:
    if not path.is_file():
        raise InputError(f"{path} is not there; name the folder of reference data")
    rows = []
    for row in read_table(path):
        try:
            if row.faults or row.peak_memory_gib is None:
                raise InputError("; ".join(row.faults) or "no peak_mem_gib")
            rows.append(make(row))
        except (InputError, TypeError, ValueError, ZeroDivisionError, KeyError) as fault:
            raise InputError(f"{path}, line {row.line}: {fault}") from fault
    if not rows:
        raise InputError(f"{path} has no rows")
    return rows


def _by_group(rows: Sequence[MemoryRow]) -> tuple[list[MemoryRow], ...]:
    names = dict.fromkeys(row.group for row in rows)
    return tuple([row for row in rows if row.group == name] for name in names)


def _errors(rows: Sequence[MemoryRow], constant: float) -> MemoryErrors:
    counted = [abs(row.error) for row in rows if not row.suspect]
    return MemoryErrors(
        group=rows[0].group,
        rows=len(counted),
        suspect_rows=len(rows) - len(counted),
        mean_error=sum(counted) / len(counted) if counted else 0.0,
        worst_error=max(counted, default=0.0),
        constant_bytes=constant,
    )


def _constant(rows: Sequence[MemoryRow]) -> float:
    """The constant with the least mean relative error: a median weighted by 1 / measured."""
    left = sorted(
        (row.measured_bytes - row.predicted_bytes, 1 / row.measured_bytes) for row in rows
    )
    half, seen = sum(weight for _, weight in left) / 2, 0.0
    for residual, weight in left:
        seen += weight
        if seen >= half:
            return residual
    return 0.0


def _with_constant(row: MemoryRow, rows: Sequence[MemoryRow]) -> MemoryRow:
    """The row with a constant from the rows of other layouts."""
    others = [each for each in rows if each.predicted_bytes != row.predicted_bytes]
    return replace(row, predicted_bytes=row.predicted_bytes + _constant(others))


def _simumax_row(row: RunRow) -> MemoryRow:
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
    return MemoryRow(
        source="SimuMax v1.2, B200",
        group="B200, experts" if experts else "B200, dense",
        layout=f"{row.model}, tp {tp}, pp {pp}, cp {cp}, ep {ep}, dp {dp}, sequence {row.seq}, "
        f"batch {row.global_batch}",
        measured_bytes=(row.peak_memory_gib or 0.0) * GIBIBYTE,
        predicted_bytes=_largest(model, job, layouts, SIMUMAX_TRAINER),
    )


def _sailor_row(row: RunRow) -> MemoryRow:
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
    return MemoryRow(
        source="Sailor, MIT" if rtx else "Sailor, Clariden",
        group="RTX" if rtx else "GH200",
        layout=f"OPT-350M on {row.gpu}, tp {tp}, layers {row.settings['layers_per_stage']}, "
        f"dp {dp}, microbatch {size}, batch {row.global_batch}",
        measured_bytes=(row.peak_memory_gib or 0.0) * GIBIBYTE,
        predicted_bytes=_largest(model, job, layouts, SAILOR_TRAINER),
        suspect="SUSPECT" in row.other,
    )


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
