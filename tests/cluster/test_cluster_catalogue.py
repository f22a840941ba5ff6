"""Laws that every entry of the shipped device catalogue keeps."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps

import pytest
from cluster_texts import source_of

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.devices import (
    DTYPES,
    FIGURES,
    DeviceKind,
)
from hetplan.files.shipped import shipped_folder

KINDS = load_catalogue(shipped_folder("configs") / "devices")
ACCELERATORS = [kind for kind in KINDS if kind.kind != "cpu"]
BY_NAME = {kind.kind: kind for kind in KINDS}


def each_kind(law: Callable[[DeviceKind], None]) -> Callable[[], None]:
    """A test of the law for every accelerator; a failure names the kind."""

    @wraps(law)
    def test() -> None:
        for kind in ACCELERATORS:
            try:
                law(kind)
            except AssertionError as error:
                error.add_note(kind.kind)
                raise

    # Pytest must not see the law's parameter.
    del test.__wrapped__  # type: ignore[attr-defined]
    return test


# Kinds whose bfloat16 and float16 rates differ, and why.
HALVES_DIFFER = {
    "amd-mi100": "its matrix cores take bfloat16 at half rate",
    "intel-gaudi3": "float16 does not run on the full width of its matrix engines",
}
# float8 over bfloat16 where it is not about 2, and why.
FLOAT8_RATIO = {
    "intel-gaudi3": (1.0, "its engines have one rate for both"),
    "aws-trainium1": (1.0, "cFP8 is a storage format there"),
    "aws-trainium3": (3.75, "MXFP8 has engines of four times the width"),
}
_GEFORCE = (4.1, "GeForce cards halve float16 that is summed in float32")
_MLU = (2.7, "the vendor prints 256 and 96")
INT8_RATIO = {
    "nvidia-rtx-2080-ti-11gb": _GEFORCE,
    "nvidia-rtx-3090-24gb": _GEFORCE,
    "nvidia-rtx-4090-24gb": _GEFORCE,
    "nvidia-rtx-5090-32gb": _GEFORCE,
    "cambricon-mlu370-x8-48gb": _MLU,
    "cambricon-mlu290-m5-32gb": _MLU,
    "cambricon-mlu370-s4-24gb": _MLU,
}


def rates(kind: DeviceKind) -> dict[str, float]:
    return dict(kind.peak_flops_per_second)


@each_kind
def test_names_begin_with_the_vendor_and_say_the_memory_they_have(kind):
    assert kind.kind.startswith(kind.vendor + "-")
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", kind.kind)
    said = re.search(r"-(\d+)gb(?:-|$)", kind.kind)
    if said:
        gigabytes = float(said.group(1))
        assert gigabytes * 1e9 <= kind.memory_bytes <= gigabytes * 2**30


@each_kind
def test_every_figure_has_a_source(kind):
    assert kind.provenance == "datasheet"
    assert all(len(source_of(kind, figure)) > 8 for figure in FIGURES)
    named = [each.figure for each in kind.sources]
    assert len(named) == len(set(named))
    assert set(named) <= set(FIGURES)
    assert "verif" not in kind.source.lower()


@each_kind
def test_figures_are_in_the_units_that_their_names_say(kind):
    assert set(rates(kind)) <= set(DTYPES)
    assert [dtype for dtype in DTYPES if dtype in rates(kind)] == list(rates(kind))
    most = {"float4": 15e15}
    assert all(5e12 <= rate <= most.get(name, 6e15) for name, rate in rates(kind).items())
    assert 11e9 <= kind.memory_bytes <= 300e9
    assert 2.5e11 <= kind.memory_bandwidth_bytes_per_second <= 1e13
    # So that every kind can be planned without a measurement.
    assert {"bfloat16", "float16"} & set(rates(kind))
    if kind.max_power_watts:
        assert 70 <= kind.max_power_watts <= 1500
    assert kind.torch_device


@each_kind
def test_links_are_of_one_direction_and_slower_than_memory(kind):
    fabric = kind.scale_up
    if fabric is None:
        return
    assert 4e10 <= fabric.bandwidth_bytes_per_second <= 1.3e12
    memory = kind.memory_bandwidth_bytes_per_second
    assert not memory or fabric.bandwidth_bytes_per_second < memory
    if fabric.one_peer_bytes_per_second:
        # A mesh: one link to each peer, all links together are the whole.
        whole = fabric.one_peer_bytes_per_second * fabric.peers
        assert whole == pytest.approx(fabric.bandwidth_bytes_per_second, rel=0.01)


@each_kind
def test_half_precisions_agree_where_a_kind_has_both(kind):
    has = rates(kind)
    if {"bfloat16", "float16"} <= set(has):
        differ = has["bfloat16"] != has["float16"]
        assert differ == (kind.kind in HALVES_DIFFER)


@each_kind
def test_wider_formats_are_slower(kind):
    has = rates(kind)
    half = has.get("bfloat16", has.get("float16"))
    if half is None:
        return
    if "float32" in has:
        assert has["float32"] <= half / 2 * 1.005  # figures of three digits
    if "tf32" in has and kind.kind != "intel-gaudi3":
        assert has["tf32"] <= half * 1.001
    if "tf32" in has and "float32" in has:
        assert has["tf32"] >= has["float32"]
    if "int8" in has:
        # Once (TPU v4, MI100) or twice the half rate; 4 is the sparse rate, or a GeForce.
        most, _ = INT8_RATIO.get(kind.kind, (2.1, ""))
        assert 0.99 <= has["int8"] / half <= most


@each_kind
def test_float4_is_no_sparse_rate(kind):
    has = rates(kind)
    if "float4" in has:
        # Blackwell has twice float8, its Ultra version about three times.
        assert 1.9 <= has["float4"] / has["float8"] <= 3.0
        assert source_of(kind, "peak.float4") != kind.source


@each_kind
def test_float8_is_about_twice_bfloat16(kind):
    has = rates(kind)
    if "float8" in has and "bfloat16" in has:
        wanted, _ = FLOAT8_RATIO.get(kind.kind, (2.0, ""))
        assert has["float8"] / has["bfloat16"] == pytest.approx(wanted, rel=0.06)


@each_kind
def test_operations_per_byte_are_those_of_a_matrix_engine(kind):
    half = max((rates(kind).get(dtype, 0.0) for dtype in ("bfloat16", "float16")), default=0.0)
    memory = kind.memory_bandwidth_bytes_per_second
    if half and memory:
        # H20 (37) is cut down on purpose; BR100 (624) has a large cache for little bandwidth.
        assert 30 <= half / memory <= 650


def test_no_two_kinds_are_called_the_same_by_their_drivers():
    names = [name.lower() for kind in KINDS for name in kind.driver_names]
    assert len(names) == len(set(names))


KNOWN = (
    ("nvidia-t4-16gb-pcie", "float16", 65, 320),
    ("nvidia-v100-32gb-sxm", "float16", 125, 900),
    ("nvidia-a10-24gb-pcie", "bfloat16", 125, 600),
    ("nvidia-a100-80gb-sxm", "bfloat16", 312, 2039),
    ("nvidia-l4-24gb-pcie", "bfloat16", 121, 300),
    ("nvidia-l40s", "bfloat16", 362, 864),
    ("nvidia-rtx-4090-24gb", "bfloat16", 165.2, 1008),
    ("nvidia-h100-80gb-sxm", "bfloat16", 989, 3350),
    ("nvidia-h200-141gb-sxm", "bfloat16", 989, 4800),
    ("nvidia-b200-180gb-sxm", "bfloat16", 2250, 8000),
    ("amd-mi250x-gcd", "bfloat16", 191.5, 1600),
    ("amd-mi300x", "bfloat16", 1307.4, 5300),
    ("amd-mi355x", "bfloat16", 2500, 8000),
    ("intel-gaudi2", "bfloat16", 432, 2460),
    ("intel-gaudi3", "bfloat16", 1678, 3700),
    ("google-tpu-v4", "bfloat16", 275, 1200),
    ("google-tpu-v5e", "bfloat16", 197, 819),
    ("google-tpu-v5p", "bfloat16", 459, 2765),
    ("google-tpu-v6e", "bfloat16", 918, 1638),
    ("google-tpu-v7x", "bfloat16", 2307, 7380),
    ("aws-trainium1", "bfloat16", 190, 820),
    ("aws-trainium2", "bfloat16", 667, 2900),
)
"""Figures typed in again from the vendors' documents: kind, format, TFLOP/s, GB/s of memory."""


def test_rates_and_memory_bandwidths_of_well_known_kinds():
    for name, dtype, peak, bandwidth in KNOWN:
        assert BY_NAME[name].peak(dtype) == pytest.approx(peak * 1e12), name
        found = BY_NAME[name].memory_bandwidth_bytes_per_second
        assert found == pytest.approx(bandwidth * 1e9), name
