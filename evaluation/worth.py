"""What is one device of a kind worth in another's terms? `python -m evaluation worth`.

Llama-70B is priced on 32 devices of each kind alone: nodes of 8, tp 8, pp 4, 64 microbatches, the
same layout everywhere, whole layers recomputed and memory ignored, so that only the devices and
the links inside their nodes differ. Worth is tokens/s over those of the reference kind. Its 90 %
interval takes the errors of both sides as independent, which those of related kinds are not.

Measured ratios compare the fastest rows of two kinds in the reference data: the same model, length,
precision and number of devices, tokens per second and device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas

from evaluation.accuracy.calibration import PredictedRun, predict_rows
from evaluation.accuracy.rows import read_runs
from evaluation.output import WORDS, Answer, Section
from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster
from hetplan.cost.estimate import estimate
from hetplan.cost.estimate_values import Estimate
from hetplan.errors import InputError
from hetplan.files.shipped import default_stores, shipped_folder
from hetplan.job.load import load_job
from hetplan.model.load import load_model
from hetplan.plans.layout import Layout, plan_of_layout
from hetplan.predict.fit import FittedPredictor, fit_stores, with_shipped

REFERENCE_KIND = "nvidia-h100-80gb-sxm"
KINDS = (
    REFERENCE_KIND,
    "nvidia-h200-141gb-sxm",
    "nvidia-b200-180gb-sxm",
    "nvidia-a100-80gb-sxm",
    "nvidia-a800-80gb-sxm",
    "nvidia-h20-96gb-sxm",
    "nvidia-l40s",
    "amd-mi250x-gcd",
    "amd-mi300x",
    "amd-mi325x",
    "amd-mi355x",
    "huawei-ascend-910b2-64gb",
    "intel-gaudi2",
    "intel-gaudi3",
)
_LAYOUT = Layout(tp=8, pp=4, sequence_parallel=True, recompute=True)
_PCIE_GBS = 32e9
"""One direction of PCI Express 4.0 x 16, for kinds without links of their own."""


def worth(reference: Path | None) -> Answer:
    """A row per kind, and the ratios of pairs that were measured."""
    predictor = with_shipped(fit_stores(*default_stores())[0])
    rows = list(_rows(predictor))
    of_pairs = pandas.DataFrame(() if reference is None else _pairs(reference, predictor))
    lines = ["no folder of measured runs: no ratio is judged"] if reference is None else []
    if len(of_pairs):
        error = of_pairs["error"].abs()
        lines.append(f"MAPE of {len(of_pairs)} ratios: {error.mean():.1%}")
    return Answer(
        sections=(
            Section(
                name="kinds",
                title=f"One device on Llama-2-70B, {REFERENCE_KIND} = 1",
                frame=pandas.DataFrame(rows),
                columns={
                    "kind": ("kind", WORDS),
                    "worth": ("worth", "{:.2f}"),
                    "from": ("lower", "{:.2f}"),
                    "to": ("upper", "{:.2f}"),
                    "MFU": ("mfu", "{:.0%}"),
                    "rests on": ("sources", WORDS),
                },
            ),
            Section(
                name="ratios",
                title="Ratios of two kinds, tokens per second and device",
                frame=of_pairs,
                columns={
                    "model": ("model", WORDS),
                    "kinds": ("kinds", WORDS),
                    "measured": ("measured", "{:.2f}"),
                    "predicted": ("predicted", "{:.2f}"),
                    "error": ("error", "{:+.1%}"),
                },
            ),
        ),
        lines=tuple(lines),
    )


def _rows(predictor: FittedPredictor) -> Iterator[dict[str, Any]]:
    known = {each.kind: each for each in load_catalogue()}
    base = _priced(known[REFERENCE_KIND], predictor)
    for kind in KINDS:
        try:
            own = base if kind == REFERENCE_KIND else _priced(known[kind], predictor)
        except InputError as error:
            yield {"kind": kind, "sources": f"not priced: {error.faults[0].message}"}
            continue
        ratio = base.step_seconds / own.step_seconds
        same = kind == REFERENCE_KIND
        spreads = [0.0 if same else math.hypot(*_logs(own, base, side)) for side in (0, 1)]
        yield {
            "kind": kind,
            "worth": ratio,
            "lower": ratio * math.exp(-spreads[0]),
            "upper": ratio * math.exp(spreads[1]),
            "mfu": own.mfu,
            "sources": ", ".join(own.sources),
        }


def _logs(own: Estimate, base: Estimate, side: int) -> tuple[float, float]:
    """(of the kind, of the reference) half an interval on the side where the worth falls, or rises.

    The worth falls with a slow step of its own, or a quick one of the reference.
    """
    slow = [math.log((each.p95_seconds or 1) / each.step_seconds) for each in (own, base)]
    quick = [math.log(each.step_seconds / (each.p5_seconds or 1)) for each in (own, base)]
    return (slow[0], quick[1]) if side == 0 else (quick[0], slow[1])


def _priced(kind: DeviceKind, predictor: FittedPredictor) -> Estimate:
    configs = shipped_folder("configs")
    model = load_model(configs / "models" / "llama-2-70b.yaml")
    job = replace(load_job(configs / "jobs" / "llama-2-70b.yaml"), global_batch_size=64)
    cluster = _cluster(load_cluster(configs / "clusters" / "mixed-768.yaml"), kind)
    plan = plan_of_layout(_LAYOUT, model, cluster, job)
    return estimate(plan, model, cluster, job, predictor)


def _cluster(example: Cluster, kind: DeviceKind) -> Cluster:
    first = example.islands[0]
    fabric = kind.scale_up
    rate = _PCIE_GBS if fabric is None else fabric.bandwidth_bytes_per_second
    island = replace(
        first,
        device=kind,
        nodes=4,
        devices_per_node=8,
        memory_bytes=1e12,
        nics=None,
        nodes_out=(),
        node_names=(),
        switch_of_device=(),
        numa_node_of_device=(),
        intra_node=replace(first.intra_node, bandwidth_bytes_per_second=rate),
    )
    return replace(example, islands=(island,), links=())


def _pairs(folder: Path, predictor: FittedPredictor) -> Iterator[dict[str, Any]]:
    rows, _ = read_runs(folder)
    groups: dict[tuple[object, ...], dict[str, PredictedRun]] = {}
    for run in predict_rows(rows, (folder,), predictor)[0]:
        row = run.row
        shape = (row.layers, row.hidden, row.ffn_hidden, row.num_experts, row.seq, row.gpus)
        known = groups.setdefault((*shape, row.product_format, row.source), {})
        kind = run.estimate.kinds[0].device
        if kind not in known or _measured(run) > _measured(known[kind]):
            known[kind] = run
    for runs in groups.values():
        for one, two in combinations(runs.items(), 2):
            (left, a), (right, b) = one, two
            measured = _measured(b) / _measured(a)
            predicted = b.estimate.tokens_per_second / a.estimate.tokens_per_second
            yield {
                "model": a.row.model,
                "kinds": f"{right} / {left}",
                "measured": measured,
                "predicted": predicted,
                "error": predicted / measured - 1.0,
            }


def _measured(run: PredictedRun) -> float:
    """Tokens per second, of as many devices in both rows of a pair."""
    row = run.row
    return (row.global_batch or 0) * (row.seq or 0) / (row.step_seconds or math.inf)
