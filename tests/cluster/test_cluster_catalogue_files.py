"""Reading device files: the user's own kinds, both schema numbers, damage, and nearest names."""

from __future__ import annotations

from contextlib import suppress

import pytest
from cluster_texts import source_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetplan.cluster.catalogue import (
    kind_called,
    load_catalogue,
    meant_kinds,
    nearest_kinds,
    user_devices,
)
from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder

SHIPPED = shipped_folder("configs") / "devices"
NAMES = [kind.kind for kind in load_catalogue(SHIPPED)]

OLD = """\
schema: hetplan.devices/1
devices:
  - kind: old-card
    vendor: acme
    peak: {bfloat16: 100 TFLOP/s}
    memory: 32 GiB
    memory_bandwidth: 1 TB/s
    provenance: datasheet
    source: a sheet
"""
NEW = """\
schema: hetplan.devices/3
devices:
  - kind: acme-one-80gb
    vendor: acme
    peak: {bfloat16: 400 TFLOP/s, float32: 50 TFLOP/s, tf32: 200 TFLOP/s, float8: 800 TFLOP/s,
      int8: 800 TOP/s}
    memory: 80 GiB
    memory_bandwidth: 2 TB/s
    scale_up: {name: AcmeLink 2, bandwidth: 300 GB/s, one_peer: 100 GB/s, peers: 3}
    host: {pcie: 5, lanes: 16}
    max_power: 0.5 kW
    overlap_compute_slowdown: 1.2
    overlap_communication_slowdown: 1.1256
    fused_attention: flash-attn
    collectives: accl
    torch_device: xla
    driver_names: [ACME One]
    provenance: datasheet
    source: Acme One datasheet
    sources:
      memory: Acme forum
      peak.float8: Acme press release
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "hetplan" / "devices"
    folder.mkdir(parents=True)
    return folder


def by_name():
    return {kind.kind: kind for kind in load_catalogue()}


def test_every_figure_of_a_file_arrives(tmp_path):
    (tmp_path / "acme.yaml").write_text(NEW)
    (kind,) = load_catalogue(tmp_path)
    assert dict(kind.peak_flops_per_second) == {
        "bfloat16": 400e12,
        "float32": 50e12,
        "tf32": 200e12,
        "float8": 800e12,
        "int8": 800e12,
    }
    assert kind.dtypes == ("bfloat16", "float32", "tf32", "float8", "int8")
    assert kind.scale_up is not None
    assert kind.scale_up.bandwidth_bytes_per_second == 300e9
    assert kind.scale_up.one_peer_bytes_per_second == 100e9
    assert kind.scale_up.peers == 3
    assert kind.host is not None
    assert kind.host.bandwidth_bytes_per_second == pytest.approx(63e9, rel=0.01)
    assert kind.max_power_watts == 500
    assert kind.overlap_compute_slowdown == 1.2
    assert kind.overlap_communication_slowdown == 1.1256
    assert (kind.collectives, kind.torch_device) == ("accl", "xla")
    assert source_of(kind, "memory") == "Acme forum"
    assert source_of(kind, "memory_bandwidth") == "Acme One datasheet"
    assert kind.driver_names == ("ACME One",)


def test_the_users_folder_adds_and_replaces_kinds(own):
    assert user_devices() == own
    before = by_name()
    (own / "mine.yaml").write_text(NEW + OLD.split("devices:\n")[1].replace("old-card", "cpu"))
    after = by_name()
    assert set(after) == {*before, "acme-one-80gb"}
    assert after["cpu"].vendor == "acme"
    assert before["cpu"].vendor == "generic"
    (own / "mine.yaml").unlink()
    assert by_name() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("bfloat16: 400 TFLOP/s", "bf16: 400 TFLOP/s"), "unknown key; did you mean bfloat16"),
        (("int8: 800 TOP/s", "int8: 800 GB/s"), "unit of bandwidth"),
        (("80 GiB", "80"), "without a unit"),
        (("peers: 3", "peers: 1.5"), "whole number"),
        (("memory: Acme forum", "colour: Acme forum"), "'colour' is no figure"),
        (("peak.float8: Acme", "peak.float16: Acme"), "peak.float16 has a source and no value"),
        (("hetplan.devices/3", "hetplan.devices/4"), "reads up to hetplan.devices/3"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, change, message):
    assert change[0] in NEW
    (tmp_path / "acme.yaml").write_text(NEW.replace(*change))
    with pytest.raises(InputError) as error:
        load_catalogue(tmp_path)
    assert message in str(error.value)
    assert "acme.yaml:" in str(error.value)


@settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damaged_files_give_kinds_or_an_input_error(tmp_path, data):
    raw = NEW.encode()
    start = data.draw(st.integers(0, len(raw)))
    stop = data.draw(st.integers(start, min(len(raw), start + 40)))
    put = data.draw(
        st.one_of(
            st.binary(max_size=8),
            st.sampled_from([b"", b"[", b"{", b": ", b"\n", b"1e999", b"9" * 400, b"&a *a", b"\0"]),
        )
    )
    (tmp_path / "acme.yaml").write_bytes(raw[:start] + put + raw[stop:])
    with suppress(InputError):
        load_catalogue(tmp_path)


@pytest.mark.parametrize(
    ("written", "first", "all_have"),
    [
        ("h10", "nvidia-h100-80gb-sxm", "h100"),
        ("mi300", "amd-mi300x", "mi300"),
        ("rtx4090", "nvidia-rtx-4090-24gb", "4090"),
        ("ascend 910b", "huawei-ascend-910b1-64gb", "910b"),
        ("MLU370", "cambricon-mlu370-s4-24gb", "mlu370"),
        ("tranium2", "aws-trainium2", "trainium"),
        ("nvidia-a100-80g-sxm", "nvidia-a100-80gb-sxm", "a100-80gb"),
    ],
)
def test_what_somebody_means_is_proposed(written, first, all_have):
    near = nearest_kinds(written, NAMES)
    assert near[0] == first
    assert all(all_have in name for name in near)


@pytest.mark.parametrize(
    ("written", "first"),
    [
        ("nvidia-h100", "nvidia-h100-80gb-sxm"),
        ("h100-sxm", "nvidia-h100-80gb-sxm"),
        ("amd-mi30x", "amd-mi300x"),
        ("acme-one-80gb", ""),
        ("my-h100", ""),
        ("", ""),
        ("-", ""),
    ],
)
def test_what_is_cut_short_or_misspelt_is_told_from_a_name_of_its_own(written, first):
    assert (*meant_kinds(written, NAMES), "")[0] == first


@pytest.mark.parametrize("written", ["", "-", "x", "foo", "zzzzzzzzz", "?" * 50, "é"])
def test_nothing_is_proposed_for_what_is_like_nothing(written):
    assert nearest_kinds(written, NAMES) == ()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(written=st.text(max_size=300), known=st.lists(st.sampled_from(NAMES), max_size=8))
def test_proposals_are_known_few_and_always_the_same(written, known):
    near = nearest_kinds(written, known)
    assert set(near) <= set(known)
    assert len(near) <= 5
    assert near == nearest_kinds(written, reversed(known))


def test_a_name_is_nearest_to_itself_and_found_without_its_vendor():
    for name in NAMES:
        assert nearest_kinds(name, NAMES)[0] == name
        if name != "cpu":
            assert name in nearest_kinds(name.split("-", 1)[1], NAMES)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-40gb-sxm"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-80gb-sxm"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-sxm"),
        ("AMD Instinct MI300X OAM", "amd-mi300x"),
        ("NVIDIA L40S", "nvidia-l40s"),
        ("NVIDIA L40", "nvidia-l40-48gb-pcie"),
        ("NVIDIA GeForce RTX 4090 D", ""),
        ("", ""),
    ],
)
def test_a_drivers_name_is_its_kind_or_none(name: str, kind: str) -> None:
    assert kind_called(name, load_catalogue(SHIPPED)) == kind
