"""Stages of the native trainer on this CPU: bytes of live tensors against the formula."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from cost_fakes import job
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetplan.cost.memory.device import device_memory
from hetplan.cost.memory.values import MemoryLayout
from hetplan.job.spec import Optimizer
from hetplan.model.layers import Experts, LatentAttention
from hetplan.model.spec import Architecture, ModelSpec, plain_model
from hetplan.plans.chosen import Shape
from hetplan.plans.plan import LayerRange, Recompute, RecomputeGranularity
from hetplan.profiling.weights import Cut
from hetplan.runtime.model_stage import StageModule, StageShape

SIZE, LENGTH, LAYERS = 4, 64, 4


class LiveBytes(TorchDispatchMode):
    """Adds up the storages of everything that operations return, until they are freed."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {each.untyped_storage()._cdata: 0 for each in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._add(each.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def shape(architecture: Architecture, other: str) -> ModelSpec:
    gpt = architecture is Architecture.GPT
    model = plain_model(
        name="small",
        architecture=architecture,
        num_layers=LAYERS,
        hidden_size=64,
        ffn_hidden_size=256 if gpt else 176,
        num_attention_heads=4,
        num_kv_heads=4 if gpt else 2,
        head_dim=16,
        vocab_size=500,
        max_sequence_length=LENGTH,
    )
    mlp = Experts(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=176)
    latent = LatentAttention(
        num_heads=4, query_rank=24, kv_rank=16, nope_head_dim=16, rope_head_dim=8, value_head_dim=24
    )
    (run,) = model.layer_runs
    changed = {
        "": {},
        "experts": {"mlp": mlp},
        "latents": {"attention": latent},
        "norms": {"attention": replace(run.layer.attention, qk_norm=True)},
    }[other]
    return replace(model, layer_runs=(replace(run, layer=replace(run.layer, **changed)),))


def live_bytes(model: ModelSpec, layers: LayerRange, full_recompute: bool) -> float:
    """Largest bytes of tensors that one forward and backward pass make."""
    stage = StageModule(
        model,
        StageShape(
            layers=layers,
            cut=Cut(),
            microbatch_size=SIZE,
            full_recompute=full_recompute,
            seed=0,
            dtype=torch.float32,
            device=torch.device("cpu"),
        ),
        group=None,
        pacer=None,
    )
    tokens = torch.zeros((SIZE, LENGTH), dtype=torch.int64)
    inputs = tokens
    if layers.start:
        inputs = torch.ones((SIZE, LENGTH, model.hidden_size), requires_grad=True)
        inputs.grad = torch.zeros_like(inputs)
    known = [inputs, tokens]
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
        known += [parameter, parameter.grad]
    with LiveBytes(*known) as live:
        if layers.stop == LAYERS + 2:
            stage(inputs, tokens).backward()
        else:
            result = stage(inputs)
            result.backward(torch.ones_like(result))
    return float(live.peak)


@pytest.mark.parametrize(
    ("architecture", "other"),
    [
        (Architecture.GPT, ""),
        *((Architecture.LLAMA, other) for other in ("", "experts", "latents", "norms")),
    ],
)
@pytest.mark.parametrize("full_recompute", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(0, 6), (1, 5)])
def test_a_stage_needs_what_the_formula_says(
    architecture: Architecture, other: str, full_recompute: bool, start: int, stop: int
) -> None:
    model, layers = shape(architecture, other), LayerRange(start=start, stop=stop)
    recompute = Recompute(granularity=RecomputeGranularity.FULL) if full_recompute else Recompute()
    use = device_memory(
        model,
        job(
            sequence_length=LENGTH, global_batch_size=SIZE, target="native", optimizer=Optimizer.SGD
        ),
        MemoryLayout(
            chunks=(layers,),
            shape=Shape(tp=1, dp=1, microbatch_size=SIZE),
            num_microbatches=1,
            recompute=recompute,
        ),
        1e9,
    )
    # A pass by itself has no messages beside it; SGD's update allocates nothing.
    message = SIZE * LENGTH * model.hidden_size * 4
    neighbours = (start > 0) + (stop < LAYERS + 2)
    predicted = use.activation_bytes + use.temporary_bytes - 2 * neighbours * message
    # What a stage receives is there before it starts: it is not among what its pass makes.
    predicted -= (start > 0) * message
    measured = live_bytes(model, layers, full_recompute)
    # 0.995 to 1.023 when this was written. Too little is worse than too much.
    # Experts that are computed again: 1.165.
    least, most = {"experts": (0.99, 1.17), "latents": (0.98, 1.04)}.get(other, (0.99, 1.04))
    assert measured * least <= predicted <= measured * most
