"""What a measurement is forecast to leave is what the fit says then; what widened is named."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from predict_samples import gpt, layer_sample

from hetplan.advice.candidates import Candidate, PlanNeeds, candidates
from hetplan.advice.plan_sensitivities import PredictionKey
from hetplan.cli.options import read_inputs
from hetplan.job.spec import Precision
from hetplan.model.spec import LayerKind
from hetplan.predict.fit import FittedPredictor, fit_populations
from hetplan.predict.predictor import LayerQuery
from hetplan.profiling.needs import Here
from hetplan.profiling.samples import LayerSample, Phase, ProfileSet
from hetplan.search.result import Inputs

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
KIND = "cpu"  # of the cluster file; no datasheet speaks for it
PASSES = (Phase.FORWARD.value, Phase.BACKWARD.value)
QUIET = 1.1
"""90 % point over 10 % point of passes on a machine with nothing else to do."""


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return read_inputs(
        CONFIGS / "models" / "gpt-tiny.yaml",
        CONFIGS / "clusters" / "this-machine.yaml",
        CONFIGS / "jobs" / "gpt-tiny.yaml",
    )


def row(hidden: int, microbatch: int, phase: str, ratio: float, off: float) -> LayerSample:
    """Of a device whose passes scatter by this ratio; its medians are off any smooth law."""
    bump = 1.0 + off * math.sin(7.0 * hidden + 3.0 * microbatch)
    seconds = (2e-4 + 1e-7 * microbatch * hidden**2) * bump
    sample = layer_sample(
        gpt(64),
        seconds,
        phase=phase,
        microbatch=microbatch,
        sequence=128,
        precision=Precision.FLOAT32,
        device=KIND,
    )
    return replace(
        sample,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=4,
        num_kv_heads=4,
        head_dim=hidden // 4,
        vocab_size=512,
        p10_seconds=seconds / math.sqrt(ratio),
        p90_seconds=seconds * math.sqrt(ratio),
    )


def rows(
    microbatches: Iterable[int],
    ratio: float,
    hidden: Iterable[int] = (64,),
    off: float = 0.05,
) -> tuple[LayerSample, ...]:
    return tuple(
        row(h, b, phase, ratio, off) for h in hidden for b in microbatches for phase in PASSES
    )


def fitted(samples: Iterable[LayerSample]) -> FittedPredictor:
    return fit_populations([ProfileSet(layers=tuple(samples), links=(), provenance=())])


def width(inputs: Inputs, predictor: FittedPredictor, microbatch: int) -> float:
    device = inputs.cluster.islands[0].device
    forward = LayerQuery(
        model=inputs.model,
        layer=LayerKind.TRANSFORMER,
        microbatch_size=microbatch,
        sequence_length=128,
        tp=1,
        precision=Precision.FLOAT32,
    )
    both = (forward, replace(forward, is_backward=True))
    return max(predictor.layer(device, each).log_halfwidth for each in both)


def wanted(
    inputs: Inputs, samples: tuple[LayerSample, ...], microbatch: int
) -> tuple[PredictionKey, tuple[Candidate, ...], FittedPredictor]:
    """What could be measured for one layer at one size, with these samples held."""
    predictor = fitted(samples)
    asked = PredictionKey(
        cause=KIND, layer=LayerKind.TRANSFORMER.value, microbatch_size=microbatch, tp=1
    )
    found = PlanNeeds(
        model=inputs.model,
        cluster=inputs.cluster,
        job=inputs.job,
        predictor=predictor,
        asked=(asked,),
        largest_messages={},
        log_halfwidths={asked.name: width(inputs, predictor, microbatch)},
        layers=samples,
        links=(),
    )
    return asked, candidates(found, Here(torch_device="cpu", kind=KIND), 2), predictor


def left(asked: PredictionKey, candidate: Candidate, now: float) -> float:
    (leaves,) = [each for each in candidate.leaves if each.asked == asked.name]
    return leaves.of(now)


@pytest.mark.parametrize("ratio", [QUIET, 2.0, 6.0])
@pytest.mark.parametrize("held", [(1, 2), (1, 2, 16)])
def test_the_very_shape_leaves_what_the_fit_says_after_it(
    inputs: Inputs, held: tuple[int, ...], ratio: float
) -> None:
    """Before any size was left out, on a machine with little, some and much other work."""
    samples = rows(held, ratio)
    asked, found, predictor = wanted(inputs, samples, 4)
    (very,) = [each for each in found if "microbatch 4 " in each.name]
    now = width(inputs, predictor, 4)
    after = width(inputs, fitted((*samples, *rows((4,), ratio))), 4)
    assert left(asked, very, now) == pytest.approx(min(now, after), rel=0.02)
    # Measuring exactly what is asked for widens nothing but what the row itself scatters.
    assert after <= max(now, math.log(ratio) / 2) + 1e-9
