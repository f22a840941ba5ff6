"""What is one device of a kind worth in another's terms? `python -m evaluation worth`.

Llama-2-70B is planned for 32 devices of each kind alone, in the nodes that they are sold in
(configs/nodes.yaml), by the search that users have: every kind has its own best layout for
Megatron-LM. Worth is tokens/s over those of the reference kind. Its 90 % interval takes the errors
of both sides as independent, which those of related kinds are not.

Measured ratios compare the fastest rows of two kinds in the reference data: the same model, length,
precision and number of devices, tokens per second and device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas

from evaluation.accuracy.calibration import PredictedRun, predict_rows
from evaluation.accuracy.rows import read_runs
from evaluation.output import WORDS, Answer, Section
from hetplan.cluster.file_form import CLUSTER_SCHEMA
from hetplan.cluster.load import load_cluster
from hetplan.cluster.templates import NodeTemplate, node_templates
from hetplan.cost.estimate_values import Estimate
from hetplan.errors import InfeasibleError, InputError
from hetplan.files.shipped import default_stores, shipped_folder
from hetplan.job.load import load_job
from hetplan.model.load import load_model
from hetplan.predict.fit import FittedPredictor, fit_stores, with_shipped
from hetplan.predict.predictor import DATASHEET
from hetplan.search.result import SearchResult
from hetplan.search.search import search

REFERENCE_KIND = "nvidia-h100-80gb-sxm"
_DEVICES = 32
_SEQUENCES = 256
"""A million tokens in a step, of 4,096 each."""


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
                    "node": ("node", WORDS),
                    "worth": ("worth", "{:.2f}"),
                    "from": ("lower", "{:.2f}"),
                    "to": ("upper", "{:.2f}"),
                    "MFU": ("mfu", "{:.0%}"),
                    "best layout": ("layout", WORDS),
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
    nodes: dict[str, NodeTemplate] = {}
    for template in node_templates().values():
        nodes.setdefault(template.device, template)
    base = _planned(nodes[REFERENCE_KIND], predictor)
    for kind, template in nodes.items():
        same = kind == REFERENCE_KIND
        try:
            found = base if same else _planned(template, predictor)
        except (InputError, InfeasibleError) as error:
            why = str(error).splitlines()[0]
            yield {"kind": kind, "node": template.node, "layout": "", "sources": f"no plan: {why}"}
            continue
        own = found.estimate
        ratio = base.estimate.step_seconds / own.step_seconds
        spreads = [0.0 if same else math.hypot(*_logs(own, base.estimate, side)) for side in (0, 1)]
        yield {
            "kind": kind,
            "node": template.node,
            "worth": ratio,
            "lower": ratio * math.exp(-spreads[0]),
            "upper": ratio * math.exp(spreads[1]),
            "mfu": own.mfu,
            "layout": _layout(found),
            "sources": ", ".join(each for each in own.sources if each != DATASHEET) or DATASHEET,
        }


def _layout(found: SearchResult) -> str:
    pipeline = found.plan.pipelines[0]
    first = pipeline.stages[0].replicas[0]
    idle = _DEVICES - sum(each.num_devices for s in pipeline.stages for each in s.replicas)
    left = f", {idle} idle" if idle else ""
    return f"tp {first.tp}, dp {first.dp}, pp {len(pipeline.stages)}{left}"


def _logs(own: Estimate, base: Estimate, side: int) -> tuple[float, float]:
    """(of the kind, of the reference) half an interval on the side where the worth falls, or rises.

    The worth falls with a slow step of its own, or a quick one of the reference.
    """
    slow = [math.log((each.p95_seconds or 1) / each.step_seconds) for each in (own, base)]
    quick = [math.log(each.step_seconds / (each.p5_seconds or 1)) for each in (own, base)]
    return (slow[0], quick[1]) if side == 0 else (quick[0], slow[1])


def _planned(template: NodeTemplate, predictor: FittedPredictor) -> SearchResult:
    configs = shipped_folder("configs")
    model = load_model(configs / "models" / "llama-2-70b.yaml")
    job = load_job(configs / "jobs" / "llama-2-70b.yaml")
    job = replace(job, global_batch_size=_SEQUENCES, target="megatron")
    in_node = min(_DEVICES, template.devices)
    text = (
        f"schema: {CLUSTER_SCHEMA}\nname: worth\nregions:\n  - name: here\n    islands:\n"
        f"      - {{name: all, node: {template.node}, devices_per_node: {in_node}, "
        f"nodes: {_DEVICES // in_node}}}\n"
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(text, encoding="utf-8")
        cluster = load_cluster(path)
    return search(model, cluster, job, predictor)


def _pairs(folder: Path, predictor: FittedPredictor) -> Iterator[dict[str, Any]]:
    rows, _ = read_runs(folder)
    groups: dict[tuple[object, ...], dict[str, PredictedRun]] = {}
    for run in predict_rows(rows, (folder,), predictor)[0]:
        row = run.row
        shape = (row.model, row.layers, row.hidden, row.num_experts, row.seq, row.gpus)
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
