"""Data, stages and updates of one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runtime_cases import GPT, TIED_GPT
from torch import nn

from hetplan.job.spec import Optimizer
from hetplan.model.spec import TRAINED_KINDS, ModelSpec
from hetplan.plans.plan import LayerRange
from hetplan.profiling.pacing import PacedKind, PaceEntry, Pacer
from hetplan.profiling.weights import Cut, FlatParameters, make_rule
from hetplan.runtime.data import MarkovTokens
from hetplan.runtime.model_stage import StageModule, StageShape


def stage(
    model: ModelSpec,
    start: int,
    stop: int,
    *,
    full_recompute: bool = False,
    pacer: Pacer | None = None,
) -> StageModule:
    shape = StageShape(
        layers=LayerRange(start=start, stop=stop),
        cut=Cut(),
        microbatch_size=2,
        full_recompute=full_recompute,
        seed=0,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return StageModule(model, shape, group=None, pacer=pacer)


def test_samples_depend_on_seed_and_number_only() -> None:
    data = MarkovTokens.of(50, seed=1)
    many = data.samples(np.arange(5), 12)
    assert np.array_equal(many[3:4], data.samples(np.array([3]), 12))
    assert not np.array_equal(many, MarkovTokens.of(50, seed=2).samples(np.arange(5), 12))
    assert len({tuple(row) for row in many.tolist()}) == 5


def test_every_layer_is_paced_forward_and_backward() -> None:
    entries = tuple(
        PaceEntry(layer=layer, phase=phase, microbatch_size=2, tp=1, seconds=seconds)
        for layer in TRAINED_KINDS
        for phase, seconds in (("forward", 0.004), ("backward", 0.008))
    )
    slept: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    kind = PacedKind(device="slow", slow_down=1.0, entries=entries)
    # A clock that only sleeping moves: the layers' real time is nothing.
    pacer = Pacer(kind, clock=lambda: now[0], sleep=sleep)
    tokens = torch.arange(32).view(2, 16)
    stage(TIED_GPT, 0, 6, pacer=pacer)(tokens, tokens).backward()
    assert (pacer.passes, pacer.overruns) == (12, 0)
    assert now[0] == pytest.approx(6 * 0.012)
    now[0] = 0.0
    stage(GPT, 0, 6, pacer=pacer, full_recompute=True)(tokens, tokens).backward()
    # Four transformer layers run their forward pass twice.
    assert now[0] == pytest.approx(6 * 0.012 + 4 * 0.004)


@pytest.mark.parametrize("optimizer", Optimizer)
def test_flat_parameters_update_as_single_ones_do(optimizer: Optimizer) -> None:
    def module() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    single, flat = module(), module()
    rule, parameters = make_rule(optimizer, single.parameters()), FlatParameters(flat, optimizer)
    for step in range(3):
        x = torch.full((4, 5), 0.1 * step + 0.3)
        parameters.clear()
        rule.zero_grad()
        for each in (single, flat):
            each(x).square().sum().backward()
            each(-x).square().sum().backward()
        rule.step()
        parameters.update()
    for one, other in zip(single.parameters(), flat.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-8)
        assert other.grad.data_ptr() in range(
            parameters.gradients.data_ptr(),
            parameters.gradients.data_ptr() + parameters.gradients.nbytes,
        )


def test_bfloat16_weights_are_updated_in_float32() -> None:
    """Steps far below bfloat16's resolution must add up."""
    module = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.ones_(module.weight)
    parameters = FlatParameters(module, Optimizer.SGD)
    for _ in range(100):
        parameters.clear()
        # SGD_RATE 0.1 * 0.002 = 2e-4 a step; bfloat16 near 1 has steps of 4e-3 to 8e-3.
        parameters.gradients.fill_(0.002)
        parameters.update()
    assert module.weight.float().mean().item() == pytest.approx(1 - 100 * 2e-4, abs=4e-3)
