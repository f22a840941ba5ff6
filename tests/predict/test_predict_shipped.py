"""Kinds that others measured: shipped laws, who goes before them, narrow products, attention."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from predict_samples import gpt, query

from hetplan.files.shipped import shipped_folder
from hetplan.job.spec import Precision, ProductFormat
from hetplan.model.operators import OperatorClass
from hetplan.model.spec import LayerKind
from hetplan.predict.datasheet import known_kinds
from hetplan.predict.fit import (
    FittedPredictor,
    fit,
    fit_populations,
    fit_stores,
    load_predictor,
    predictor_text,
    with_shipped,
)
from hetplan.predict.layer.float8 import quantise_bytes
from hetplan.predict.operator.values import OperatorLaw
from hetplan.predict.predictor import BY_OTHERS, MEASURED, RELATED, LayerQuery
from hetplan.profiling.samples import ProfileSet
from hetplan.profiling.store import read_populations, stores_digest

KINDS = known_kinds()
DEFAULT = with_shipped(FittedPredictor.datasheet_only())


def asked(narrow: str = "", **kernels: bool) -> LayerQuery:
    plain = query(
        gpt(8192), LayerKind.TRANSFORMER, microbatch=4, tp=1, precision=Precision.BFLOAT16
    )
    return replace(plain, kernels=replace(plain.kernels, product_format=narrow, **kernels))


@pytest.mark.parametrize(
    "kind", ["nvidia-a100-80gb-sxm", "nvidia-h100-80gb-sxm", "nvidia-b300-288gb-sxm", "nvidia-l40s"]
)
def test_nobody_has_to_profile_a_kind_that_others_measured(kind: str) -> None:
    found = DEFAULT.layer(KINDS[kind], asked())
    assert found.source == BY_OTHERS
    assert found.log_halfwidth < 0.3
    products = next(part for part in found.parts if part.name == OperatorClass.MATRIX_PRODUCT)
    flops = 2.0 * 12 * 8192**2 * 4 * 2048
    assert 0.4 < flops / products.seconds / KINDS[kind].peak("bfloat16") < 0.85
    # Boards of the same chip and other kinds go by them too.
    assert DEFAULT.layer(KINDS["nvidia-h800-80gb-sxm"], asked()).source == RELATED


def test_nothing_is_called_measured_that_nobody_here_measured() -> None:
    for kind in KINDS.values():
        for layer in (LayerKind.EMBEDDING, LayerKind.TRANSFORMER, LayerKind.HEAD):
            if "bfloat16" in dict(kind.peak_flops_per_second):
                assert DEFAULT.layer(kind, replace(asked(), layer=layer)).source != MEASURED


def test_whoever_measured_a_kind_goes_before_what_is_shipped() -> None:
    """Own products of half the speed: the layer takes them, and the rest stays the others'."""
    (store,) = (
        each
        for each in read_populations(shipped_folder("profiles") / "kinds")
        if each.provenance[0].device == "nvidia-h100-80gb-sxm"
    )
    products = [
        replace(each, median_seconds=2.0 * each.median_seconds)
        for each in store.operators
        if each.operator == OperatorClass.MATRIX_PRODUCT and each.precision == Precision.BFLOAT16
    ]
    own = with_shipped(fit(replace(store, operators=tuple(products))))
    assert {(law.device, law.operator, law.precision) for law in own.shipped}.isdisjoint(
        {("nvidia-h100-80gb-sxm", "matrix_product", "bfloat16")}
    )
    here, there = (each.layer(KINDS["nvidia-h100-80gb-sxm"], asked()) for each in (own, DEFAULT))
    assert here.source == MEASURED
    assert set(here.sources) == {MEASURED, BY_OTHERS}
    assert there.sources == (BY_OTHERS,)
    by = {each.name: each.source for each in here.parts}
    assert (by["matrix_product"], by["fused_attention"]) == (MEASURED, BY_OTHERS)

    def part(found: object, name: str) -> float:
        return next(each.seconds for each in found.parts if each.name == name)  # type: ignore[attr-defined]

    for name, ratio in (("matrix_product", 2.0), ("fused_attention", 1.0)):
        assert part(here, name) / part(there, name) == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize("narrow", [ProductFormat.FLOAT8, ProductFormat.NVFP4])
def test_measured_narrow_products_hold_one_pass_of_quantising(narrow: ProductFormat) -> None:
    kind = KINDS["nvidia-gb200-186gb"]
    wide, found = DEFAULT.layer(kind, asked()), DEFAULT.layer(kind, asked(narrow))
    assert found.source == BY_OTHERS
    assert not any("ratio of peak" in note for note in found.extrapolating)
    assert 1.2 < wide.seconds / found.seconds < 3.0
    quantised = sum(
        op.count * quantise_bytes(op, narrow, backward=False)
        for op in asked().operators()
        if op.operator == OperatorClass.MATRIX_PRODUCT
    )
    passes = next(part.seconds for part in found.parts if part.name == "quantise")
    # Bytes at less than the memory's rate would be all of them; half are in the products.
    assert 0 < passes * kind.memory_bandwidth_bytes_per_second < 0.9 * quantised


def test_formats_that_nobody_measured_reach_part_of_the_ratio_of_peaks() -> None:
    kind = KINDS["amd-mi300x"]
    found = DEFAULT.layer(kind, asked(ProductFormat.FLOAT8))
    assert any("reach of the ratio of peak rates, 1.68" in note for note in found.extrapolating)


def test_pytorchs_attention_is_slower_where_faster_kernels_exist() -> None:
    for kind, ratio in (("nvidia-h100-80gb-sxm", 1.73), ("nvidia-a100-80gb-sxm", 1.0)):
        tuned, plain = (
            next(
                part.seconds
                for part in DEFAULT.layer(KINDS[kind], asked(tuned_attention=each)).parts
                if part.name == OperatorClass.FUSED_ATTENTION
            )
            for each in (True, False)
        )
        assert plain / tuned == pytest.approx(ratio)


def test_shipped_laws_name_kinds_of_the_catalogue_and_no_single_shape() -> None:
    laws = load_predictor(shipped_folder("profiles") / "kinds" / "laws.json").laws.operators
    assert {law.device for law in laws} <= set(KINDS)
    assert not any(law.shapes for law in laws)
    assert {law.precision for law in laws} == {"bfloat16", "float8", "nvfp4"}


@pytest.mark.slow
def test_shipped_laws_are_the_fit_of_the_shipped_samples() -> None:
    kinds = pytest.importorskip("evaluation.distil.kinds")
    fitted = {key(law): law for law in kinds.shipped_laws(samples()).operators}
    for law in load_predictor(shipped_folder("profiles") / "kinds" / "laws.json").laws.operators:
        again = fitted.pop(key(law))
        assert [term.column for term in again.terms] == [term.column for term in law.terms]
        for one, other in zip(again.terms, law.terms, strict=True):
            assert math.isclose(one.coefficient, other.coefficient, rel_tol=1e-6)
    assert not fitted


def key(law: OperatorLaw) -> tuple[str, str, str, str]:
    return law.device, law.precision, law.operator, law.phase


def samples() -> tuple[ProfileSet, ...]:
    return read_populations(shipped_folder("profiles") / "kinds")


def test_the_shipped_fit_is_the_fit_of_the_shipped_stores() -> None:
    profiles = shipped_folder("profiles")
    stores = profiles / "cpu", profiles / "links"
    shipped = profiles / "fitted" / f"{stores_digest(*stores)}.json"
    assert list(shipped.parent.iterdir()) == [shipped], (
        f"remove {shipped.parent}, then write it again: hetplan fit --store {stores[0]} "
        f"--store {stores[1]} --out {shipped}"
    )
    fitted = predictor_text(fit_populations(read_populations(*stores)))
    assert rounded(fitted) == rounded(shipped.read_text())
    predictor, digest = fit_stores(*stores)
    assert predictor_text(predictor) == shipped.read_text()
    assert digest == hashlib.sha256(shipped.read_bytes()).hexdigest()


def test_a_store_with_one_changed_time_is_fitted_anew(tmp_path: Path) -> None:
    shutil.copytree(shipped_folder("profiles") / "links", tmp_path / "links")
    (rows,) = (tmp_path / "links").rglob("links.csv")
    same = stores_digest(tmp_path / "links")
    assert same == stores_digest(shipped_folder("profiles") / "links")
    rows.write_text(rows.read_text().replace("1", "2", 1))
    assert stores_digest(tmp_path / "links") != same


def rounded(text: str) -> object:
    """What a JSON text holds, to six digits: another processor may add in another order."""
    return json.loads(text, parse_float=lambda word: f"{float(word):.6g}")
