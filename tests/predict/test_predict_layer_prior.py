"""Laws of layers of few sizes: what is read into them, and how far they carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from predict_samples import fitted, layer_grid, query

from hetplan.cluster.catalogue import load_catalogue
from hetplan.model.operators import Kernels
from hetplan.predict.layer.answer import kernel_notes
from hetplan.predict.layer.laws import fit_layer_laws
from hetplan.predict.layer.values import LayerColumns, LayerLaw, layer_columns
from hetplan.profiling.samples import LayerSample

KIND = "nvidia-a100-80gb-sxm"
A100 = next(kind for kind in load_catalogue() if kind.kind == KIND)
BANDWIDTH = A100.memory_bandwidth_bytes_per_second
RATE, TF32_RATE = (dict(A100.peak_flops_per_second)[name] for name in ("bfloat16", "tf32"))


def eager(columns: LayerColumns, work: float = 1.0, rate: float = RATE) -> float:
    """Scores in memory, products at 60 % of the rate, nothing at its arithmetic value."""
    products = columns.matrix_flops + 2.0 * columns.attention_flops
    moved = 1.6 * columns.elementwise_bytes + 9.0 * columns.score_bytes
    return 3e-4 + work * (products / (0.6 * rate) + moved / BANDWIDTH)


def fused(columns: LayerColumns, work: float = 1.0, rate: float = RATE) -> float:
    """A causal kernel, and nothing written of its scores."""
    flops = columns.matrix_flops / (0.6 * rate) + columns.attention_flops / (0.5 * rate)
    return 3e-4 + work * (flops + 1.6 * columns.elementwise_bytes / BANDWIDTH)


def samples_of(
    law, hidden: Sequence[int] = (2048,), noise: float = 0.01, device: str = KIND
) -> list[LayerSample]:
    found = []
    for phase, work in (("forward", 1.0), ("backward", 2.0)):
        found += layer_grid(
            hidden=hidden,
            microbatches=(1, 2, 4, 8),
            sequences=(2048,),
            tps=(1, 2),
            phase=phase,
            law=lambda columns, work=work: law(columns, work),
            noise=noise,
            seed=3,
            device=device,
        )
    return found


def error(law: LayerLaw, true, hidden: int) -> float:
    """Of the law on another hidden size, as a fraction."""
    columns = layer_columns(query(hidden, microbatch=4))
    work = 1.0 if law.phase == "forward" else 2.0
    predicted = law.sum_of_columns(columns)
    return abs(predicted / true(columns, work) - 1.0)


@pytest.mark.parametrize("true", [eager, fused])
def test_one_size_carries_to_others_and_says_what_was_read_into_it(true) -> None:
    held = fit_layer_laws(samples_of(true))
    free = fit_layer_laws(samples_of(true, device="testium-1"))
    for law in held:
        assert ("score_bytes" in {term.column for term in law.terms}) is (true is eager)
        words = "scores in memory" if true is eager else "fused attention"
        assert words in law.notes[0]
        assert max(error(law, true, hidden) for hidden in (1024, 4096, 8192)) < 0.15
    if true is eager:
        # Without a datasheet one size cannot tell scores from products.
        assert max(error(law, true, 8192) for law in free) > 0.3


def test_float32_faster_than_float32_ran_in_tf32() -> None:
    def tf32(columns: LayerColumns, work: float = 1.0) -> float:
        return fused(columns, work, TF32_RATE)

    for law in fit_layer_laws(samples_in_float32(tf32)):
        assert "156 TFLOP/s" in law.notes[0]


def samples_in_float32(law) -> list[LayerSample]:
    return [replace(sample, precision="float32") for sample in samples_of(law, (4096,))]


def test_left_out_sizes_choose_scores_where_scores_were_kept() -> None:
    for law in fit_layer_laws(samples_of(eager, (1024, 4096))):
        assert "scores in memory" in law.notes[0]
        assert law.validation.left_out == "hidden"
        assert law.validation.worst < 0.15


def test_kernels_that_samples_do_not_tell_are_said() -> None:
    default = Kernels()
    other = Kernels(fused_attention=False, hidden_dropout=True)
    kept, causal = (fit_layer_laws(samples_of(true))[0] for true in (eager, fused))
    assert kernel_notes(causal, default) == ()
    (note,) = kernel_notes(causal, other)
    assert "not known: scores in memory, dropout of the residual" in note
    # By its times this one was measured with scores in memory.
    (note,) = kernel_notes(kept, default)
    assert "kept attention scores in memory" in note
    (note,) = kernel_notes(kept, other)
    assert "not known: dropout of the residual may" in note
    # For the very layer that was measured as well.
    found = fitted(samples_of(fused)).layer(A100, query(kernels=other))
    assert kernel_notes(causal, other)[0] in found.extrapolating
