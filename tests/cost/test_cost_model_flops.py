"""Model FLOPs against the closed form, and intervals that begin where physics does."""

import numpy as np
import pytest

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cost.estimate import StepCalibration, span_of
from hetplan.cost.model_flops import flops_per_token, peak_of
from hetplan.files.shipped import shipped_folder
from hetplan.job.load import load_job
from hetplan.model.load import load_model


def test_model_flops_are_six_per_parameter_and_token_and_causal_attention():
    configs = shipped_folder("configs")
    model = load_model(configs / "models" / "llama-2-7b.yaml")
    job = load_job(configs / "jobs" / "llama-2-7b.yaml")
    h, f, layers, s = 4096, 11008, 32, job.sequence_length
    products = layers * (4 * h * h + 3 * h * f) + h * 32000
    # Scores and context, 2 x 2 s h per token and layer, at half, three passes.
    assert flops_per_token(model, job) == pytest.approx(6 * products + layers * 6 * s * h)


def test_float32_is_held_against_tf32_where_the_kind_has_it():
    kinds = {each.kind: each for each in load_catalogue()}
    a100, v100 = kinds["nvidia-a100-80gb-sxm"], kinds["nvidia-v100-16gb-sxm"]
    assert peak_of(a100, "float32") == pytest.approx(156e12)
    assert peak_of(a100, "bfloat16") == pytest.approx(312e12)
    assert peak_of(v100, "float32") == dict(v100.peak_flops_per_second)["float32"]


def test_no_interval_begins_before_the_least_seconds():
    steps = np.exp(np.random.default_rng(1).normal(0.0, 0.5, 200))
    free, cut = (span_of(steps, 1.0, StepCalibration(), least) for least in (0.0, 0.8))
    assert free.p5_seconds < 0.8 == pytest.approx(cut.p5_seconds)
    assert cut.p95_seconds == free.p95_seconds
    assert "sustained" in cut.note
    assert "sustained" not in free.note
