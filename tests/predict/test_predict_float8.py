"""Products in a narrower format: only their operations change, and every prediction says so."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from predict_operators import (
    BYTES_PER_SECOND,
    FLOPS_PER_SECOND,
    operator_grid,
)
from predict_samples import DEVICE, provenance, query

from hetplan.errors import InputError
from hetplan.model.operators import (
    Kernels,
    OperatorClass,
    operator_flops,
)
from hetplan.model.spec import LayerKind
from hetplan.predict.fit import FittedPredictor, fit
from hetplan.predict.layer import float8
from hetplan.profiling.samples import ProfileSet

WIDE = Kernels(fused_attention=False, attention_dropout=True, hidden_dropout=True)
NARROW = replace(WIDE, product_format="float8")
KIND = replace(
    DEVICE,
    peak_flops_per_second=(("bfloat16", 300e12), ("float8", 600e12), ("float4", 1200e12)),
)
"""Of the operators' truth twice and four times the rate."""


def predictor(samples=operator_grid(), layers=()):  # noqa: B008
    return fit(ProfileSet(layers=layers, links=(), operators=samples, provenance=(provenance(),)))


def ask(found, kernels=NARROW, *, backward=False, kind=KIND, model=None, **more):
    asked = query(
        2560 if model is None else model,
        more.get("layer", LayerKind.TRANSFORMER),
        microbatch=more.get("microbatch", 4),
        tp=more.get("tp", 1),
        kernels=kernels,
        backward=backward,
    )
    return found.layer(kind, asked)


def parts(prediction):
    return {part.name: part.seconds for part in prediction.parts}


def products(backward, model=None):
    """Operations and elements of inputs of the products with weights, counted here."""
    flops = inputs = outputs = 0.0
    for op in query(2560 if model is None else model, microbatch=4, kernels=WIDE).operators():
        if op.operator is OperatorClass.MATRIX_PRODUCT:
            flops += op.count * operator_flops(op, "backward" if backward else "forward")
            inputs += op.count * op.m * op.k
            outputs += op.count * op.m * op.n
    return flops, outputs if backward else inputs


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("name", "ratio", "bytes_per_element"),
    [("float8", 2.0**0.75, 6.0), ("mxfp8", 2.0**0.75, 4.0625), ("nvfp4", 4.0**0.75, 5.125)],
)
def test_operations_shrink_by_the_ratio_and_quantising_is_added(
    name, ratio, bytes_per_element, backward
) -> None:
    found = predictor()
    wide = ask(found, WIDE, backward=backward)
    narrow = ask(found, replace(WIDE, product_format=name), backward=backward)
    before, after = parts(wide), parts(narrow)
    flops, elements = products(backward)
    saved = before["matrix_product"] - after["matrix_product"]
    assert saved == pytest.approx(flops / FLOPS_PER_SECOND * (1 - 1 / ratio), rel=0.03)
    assert after.pop(float8.QUANTISE) == pytest.approx(
        elements * bytes_per_element / BYTES_PER_SECOND, rel=0.03
    )
    # Transformer Engine sums biases' gradients where it quantises (`cast_transpose_dbias`).
    assert (before.pop("bias_gradient", 0.0) > 0.0) == backward
    for each in (before, after):
        del each["matrix_product"]
    assert before == after
    assert sum(parts(narrow).values()) == pytest.approx(narrow.seconds)


def test_every_answer_says_that_it_is_assumed_and_is_wider() -> None:
    found = predictor()
    note = (
        "float8 products not measured: bfloat16's law by what others reach of the ratio of peak "
        "rates, 1.68"
    )
    for backward in (False, True):
        wide, narrow = (ask(found, each, backward=backward) for each in (WIDE, NARROW))
        assert note in narrow.extrapolating
        assert note not in wide.extrapolating
        assert narrow.log_halfwidth > wide.log_halfwidth
        share = parts(narrow)["matrix_product"] / narrow.seconds
        assert narrow.log_halfwidth < share * 0.25 * math.log(2.0) + wide.log_halfwidth + 0.05


def test_a_kind_without_the_rate_is_refused() -> None:
    old = replace(KIND, peak_flops_per_second=(("bfloat16", 300e12),))
    for found in (predictor(), FittedPredictor.datasheet_only()):
        with pytest.raises(InputError, match="no float8 rate"):
            ask(found, NARROW, kind=old)
        with pytest.raises(InputError, match="no float4 rate"):
            ask(found, replace(WIDE, product_format="nvfp4"), kind=old)
