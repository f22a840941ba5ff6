"""What could attention on one kind and experts on another gain? `python -m evaluation experts`.

HeterMoE's form (arXiv 2504.03871) as a linear program over two islands k. Part p (what layers have
beside routed experts, these, embedding, head) takes w_kp seconds if island k alone has it, at its
best tp, ep and microbatch size. Nothing is lost to bubbles, whole layers, memory, or communication
except between the two:

    T = min T:  sum_p w_kp x_kp + cost_k d <= T,  hold_k d <= T,  sum_k x_kp = 1,
                |x_k,attention - x_k,experts| <= d <= D

D = 0: T_same, the limit of uneven pipelines, and of stages on both islands of which each has all
experts and a share of the tokens. D = 1: the part d of tokens * hidden * 2 bytes * experts per
token crosses, there and back, forward and backward, and holds a node's link c_k d seconds each way:

    free      cost 0, hold 0                     no communication
    bound     cost 0, hold c                     hidden at no cost, as by no trainer
    hidden    cost s c (1 - 1 / r), hold s c     s, r: slow-downs of hetplan.cost.step_model.overlap
    in_turn   cost 2 c, hold 0                   as in the reference trainer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas
from scipy.optimize import linprog

from evaluation.output import WORDS, Answer, Section
from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Cluster, Island
from hetplan.cost.arrays import Floats
from hetplan.cost.step_model.overlap import slowdowns
from hetplan.errors import InfeasibleError, LimitError
from hetplan.files.shipped import default_stores, shipped_folder
from hetplan.job.kernels import job_on
from hetplan.job.spec import Forbids, Job, Optimizer, Precision
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import Attention, Experts
from hetplan.model.load import load_model
from hetplan.model.operators import Operator
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.predict.fit import fit_stores, with_shipped
from hetplan.predict.layer.composed import WAIT_PART
from hetplan.predict.predictor import LayerQuery, Predictor
from hetplan.search.search import search

TARGETS = ("native", "flagscale")
"""Below sm80 flagscale has no fused attention, native has PyTorch's (configs/kernels.yaml)."""
PAIRS = (("h100", "a100"), ("h100", "v100"), ("h100", "mi300x"), ("a100", "t4"), ("a40", "v100"))
LENGTHS, TOKENS, GBIT_PER_NODE = (4096, 32768), 1 << 21, (100, 400, 3200)
_PCIE = (
    "devices_per_node: 8, fabric: pcie-tree, "
    "nics: {per_node: 1, bandwidth: 100 Gbit/s}, inter_node: {latency: 10 us}"
)
HALL = f"""schema: hetplan.cluster/4
name: hall
regions:
  - name: hall
    islands:
      - {{name: h100, nodes: 4, node: dgx-h100}}
      - {{name: a100, nodes: 4, node: dgx-a100}}
      - {{name: v100, nodes: 8, node: dgx-1-v100}}
      - {{name: mi300x, nodes: 4, node: mi300x-oam-8}}
      - {{name: t4, nodes: 8, device: nvidia-t4-16gb-pcie, {_PCIE}}}
      - {{name: a40, nodes: 8, device: nvidia-a40-48gb-pcie, {_PCIE}}}
links_default: {{within_region: {{bandwidth_per_device: 50 Gbit/s, latency: 10 us}}}}
"""
"""Plans have 400 Gbit/s per node between islands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartQuery(LayerQuery):
    """The operators of a layer that are of routed experts, or those that are not."""

    experts: bool

    def operators(self) -> tuple[Operator, ...]:
        """Those of the forward pass."""
        return self._own(LayerQuery.operators(self))

    def gradient_operators(self) -> tuple[Operator, ...]:
        """What the backward pass runs besides."""
        return self._own(LayerQuery.gradient_operators(self))

    def _own(self, ops: tuple[Operator, ...]) -> tuple[Operator, ...]:
        routed = (op.dispatched or op.what.startswith("experts' ") for op in ops)
        return tuple(op for op, each in zip(ops, routed, strict=True) if each == self.experts)


def part_seconds(island: Island, model: ModelSpec, job: Job, predictor: Predictor) -> Floats:
    """Seconds w of the four parts."""
    settings, found = trainer_settings(job_on(island.device, job)), []
    layers = (LayerKind.TRANSFORMER, LayerKind.TRANSFORMER, LayerKind.EMBEDDING, LayerKind.HEAD)
    for at, layer in enumerate(layers):
        kernels, seconds = settings.kernels(layer), []
        for tp, size, ep in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8) if at == 1 else (1,)):
            query = PartQuery(
                model=model,
                layer=layer,
                microbatch_size=size,
                sequence_length=job.sequence_length,
                tp=tp,
                precision=job.precision,
                kernels=replace(kernels, sequence_parallel=tp > 1, expert_parallel=ep),
                experts=at == 1,
            )
            both = (replace(query, is_backward=each) for each in (False, True))
            parts = (part for each in both for part in predictor.layer(island.device, each).parts)
            busy = sum(part.seconds for part in parts if part.name != WAIT_PART)
            seconds.append(busy * tp / size)
        found.append(min(seconds) * (model.num_layers if at < 2 else 1))
    return np.array(found) * job.global_batch_size / island.num_devices


def least_step(work: Floats, most: float, cost: Sequence[float], hold: Sequence[float]) -> float:
    """T of the program for w [island, part] and D = `most`."""
    rows = []
    for at, sign in product((0, 1), (1.0, -1.0)):
        busy, held, apart = np.zeros((3, 10))  # of the shares by island and part, d, T
        busy[4 * at : 4 * at + 4], busy[8:] = work[at], (cost[at], -1.0)
        held[8:] = hold[at], -1.0
        apart[4 * at : 4 * at + 2], apart[8] = (sign, -sign), -1.0
        rows += [busy, held, apart]
    whole = np.hstack([np.eye(4), np.eye(4), np.zeros((4, 2))])
    bounds = [(0.0, 1.0)] * 8 + [(0.0, most), (0.0, None)]
    zeros = np.zeros(len(rows))
    found = linprog(np.eye(10)[9], rows, zeros, whole, np.ones(4), bounds=bounds)
    return float(np.asarray(found.x)[9])


def gains(
    islands: Sequence[Island], model: ModelSpec, job: Job, predictor: Predictor
) -> dict[str, float]:
    """T_same in seconds, and T_same / T - 1 of every way to communicate."""
    work = np.array([part_seconds(each, model, job, predictor) for each in islands])
    none, mlp, slow = (0.0, 0.0), model.layer_at(1).mlp, [slowdowns(i.device) for i in islands]
    same = least_step(work, 0.0, none, none)
    found = {"same_seconds": same, "free": same / least_step(work, 1.0, none, none) - 1}
    copies = mlp.experts_per_token if isinstance(mlp, Experts) else 0
    # Each way in both passes: copies or their gradients.
    sent = 2 * TOKENS * model.hidden_size * 2 * copies * model.num_layers
    for rate in GBIT_PER_NODE:
        c = [sent / (len(each.usable_nodes) * rate * 1e9 / 8) for each in islands]
        hold = [each * s.communication for each, s in zip(c, slow, strict=True)]
        cost = [each * (1 - 1 / s.compute) for each, s in zip(hold, slow, strict=True)]
        ways = {"bound": (none, c), "hidden": (cost, hold), "in_turn": ([2 * x for x in c], none)}
        for name, way in ways.items():
            # Adding zero turns the solver's -0 to 0.
            found[f"{name}_{rate}"] = round(same / least_step(work, 1.0, *way) - 1, 9) + 0.0
    return found


def models() -> tuple[ModelSpec, ...]:
    """Two shipped ones, and one of OLMoE-1B-7B's sizes (arXiv 2409.02060)."""
    folder = shipped_folder("configs") / "models"
    mixtral, qwen = (load_model(folder / f"{n}.yaml") for n in ("mixtral-8x7b", "qwen3-235b-a22b"))
    layer = replace(
        qwen.layer_at(1),
        attention=Attention(num_heads=16, num_kv_heads=16, head_dim=128, qk_norm=True),
        mlp=Experts(num_experts=64, experts_per_token=8, expert_ffn_hidden_size=1024),
    )
    runs = (replace(qwen.layer_runs[0], count=16, layer=layer),)
    small = replace(qwen, name="olmoe-1b-7b", hidden_size=2048, vocab_size=50304, layer_runs=runs)
    return mixtral, qwen, small


def hall() -> Cluster:
    """All islands that are paired."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "hall.yaml"
        path.write_text(HALL, encoding="utf-8")
        return load_cluster(path)


def experts_job(pair: Sequence[str], length: int, target: str, limit: float | None = None) -> Job:
    """Two million tokens per step on these islands."""
    others = (each.name for each in hall().islands if each.name not in pair)
    return Job(
        name="experts",
        global_batch_size=TOKENS // length,
        sequence_length=length,
        precision=Precision.FLOAT16 if {"v100", "t4"} & {*pair} else Precision.BFLOAT16,
        optimizer=Optimizer.ADAMW,
        target=target,
        gap=0.02,
        time_limit_seconds=limit,
        forbid=Forbids(islands=tuple(others)),
    )


def experts_rows(
    targets: Sequence[str], limit_seconds: float, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row per pair, model, length and target; `plan`: its best found plan's step over T_same."""
    predictor, cluster = with_shipped(fit_stores(*default_stores())[0]), hall()
    for pair, length, model, target in product(PAIRS, LENGTHS, models(), targets):
        names = {"pair": " + ".join(pair), "model": model.name, "length": length, "target": target}
        progress(", ".join(map(str, names.values())))
        job = experts_job(pair, length, target, limit_seconds)
        islands = [each for each in cluster.islands if each.name in pair]
        row = gains(islands, model, job, predictor)
        try:
            step = search(model, cluster, job, predictor).estimate.step_seconds
        except (InfeasibleError, LimitError):
            step = np.nan
        yield names | row | {"plan": step / row["same_seconds"]}


def experts_answer(rows: Sequence[dict[str, Any]]) -> Answer:
    """The table; what a trainer that hides nothing gains is at most the last column."""
    words = {name: (name, WORDS) for name in ("pair", "model", "length", "target")}
    columns = {"plan / T_same": "plan", "free": "free", "bound 400": "bound_400"}
    columns |= {f"hidden {rate}": f"hidden_{rate}" for rate in GBIT_PER_NODE}
    columns |= {"in turn 3200": "in_turn_3200"}
    forms = {name: (key, "{:.2f}" if key == "plan" else "{:.2%}") for name, key in columns.items()}
    title = "T_same / T - 1 of attention and experts apart, by Gbit/s per node between the kinds"
    table = Section(name="rows", title=title, frame=pandas.DataFrame(rows), columns=words | forms)
    return Answer(sections=(table,))
