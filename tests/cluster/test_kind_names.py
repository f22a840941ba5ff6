"""Names of device kinds as people type them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.load import load_cluster
from hetplan.cluster.names import guessed_kinds, meant_kind, measured_kind
from hetplan.errors import InputError, Severity
from hetplan.files.reading import document_of

KINDS = load_catalogue()
TEXT = """schema: hetplan.cluster/4
name: one
regions:
  - name: here
    islands:
      - name: a
        nodes: 1
        devices_per_node: 2
        device: %s
        intra_node: {bandwidth: 300 GB/s, latency: 3 us}
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("h100", "nvidia-h100-80gb-sxm"),
        ("H100", "nvidia-h100-80gb-sxm"),
        ("H100 PCIe", "nvidia-h100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-sxm"),
        ("MI300X", "amd-mi300x"),
        ("mi-300x", "amd-mi300x"),
        ("mi300", "amd-mi300x"),
        ("mi250", "amd-mi250-gcd"),
        ("a100-80gb", "nvidia-a100-80gb-sxm"),
        ("A100-40GB", "nvidia-a100-40gb-sxm"),
        ("910b", "huawei-ascend-910b2-64gb"),
        ("910B4", "huawei-ascend-910b4-32gb"),
        ("RTX4090", "nvidia-rtx-4090-24gb"),
        ("v100", "nvidia-v100-32gb-sxm"),
        ("t4", "nvidia-t4-16gb-pcie"),
        ("h20", "nvidia-h20-96gb-sxm"),
    ],
)
def test_a_short_name_is_understood(name, kind):
    assert meant_kind(name, KINDS).kind == kind


def test_the_other_kinds_of_a_short_name_are_known():
    assert meant_kind("h100", KINDS).others == (
        "nvidia-h100-80gb-pcie",
        "nvidia-h100-94gb-nvl",
        "nvidia-h100-96gb-hbm2e",
    )
    assert meant_kind("mi300x", KINDS).others == ()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("910", "may be each of huawei-ascend-910a"),
        ("mlu370", "cambricon-mlu370-s4-24gb, cambricon-mlu370-x8-48gb"),
        ("mi3", "amd-mi300x, amd-mi325x"),
        ("mi21", "nearest: amd-mi210"),  # half a number is a slip, not a short name
        ("gaudi", "intel-gaudi2, intel-gaudi3"),
        ("nvidia", "nearest"),
        ("80gb", "nearest"),
        ("h10o", "nvidia-h100-80gb-sxm"),
        ("", "hetplan doctor --kinds"),
        ("zzz", "hetplan doctor --kinds"),
    ],
)
def test_a_doubtful_name_is_refused_with_candidates(name, says):
    with pytest.raises(InputError, match=re.escape(says)):
        meant_kind(name, KINDS)


@given(st.sampled_from(KINDS), st.data())
def test_every_kind_is_found_by_its_own_names(kind, data):
    name = data.draw(st.sampled_from([kind.kind, kind.kind.upper(), kind.kind.replace("-", " ")]))
    assert meant_kind(name, KINDS).kind == kind.kind


@given(st.text(max_size=30))
def test_any_text_is_a_kind_or_refused_in_printable_words(text):
    known, said = {kind.kind for kind in KINDS}, ""
    try:
        assert meant_kind(text, KINDS).kind in known
    except InputError as error:
        said = str(error)
    assert said.isprintable()


def test_a_cluster_file_is_read_with_the_names_of_the_catalogue():
    for name, kind in (("H100", "nvidia-h100-80gb-sxm"), ("mi300x", "amd-mi300x")):
        cluster = load_cluster(document_of("c.yaml", (TEXT % name).encode()))
        assert cluster.islands[0].device.kind == kind


def test_a_kind_of_the_file_s_own_stands_before_all_others():
    own = "devices: [{kind: h100, vendor: us, memory: 9 GB, provenance: measured, source: us}]\n"
    cluster = load_cluster(document_of("c.yaml", (TEXT % "h100" + own).encode()))
    assert cluster.islands[0].device.vendor == "us"


def test_a_guess_in_a_file_is_told_with_its_line():
    (fault,) = guessed_kinds(document_of("c.yaml", (TEXT % "h100").encode()))
    assert (fault.file, fault.line, fault.severity) == ("c.yaml", 9, Severity.NOTE)
    assert "'h100' is taken as nvidia-h100-80gb-sxm, not nvidia-h100-80gb-pcie" in fault.message
    assert [*guessed_kinds(document_of("c.yaml", (TEXT % "mi300x").encode()))] == []


def test_measurements_are_of_one_kind():
    assert measured_kind("MI300X") == "amd-mi300x"
    assert measured_kind("our-own-chip") == "our-own-chip"
    with pytest.raises(InputError, match="measurements are of one kind"):
        measured_kind("h100")
