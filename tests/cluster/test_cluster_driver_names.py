"""Names that real drivers print, of kinds that the catalogue has."""

from __future__ import annotations

import pytest

from hetplan.cluster.catalogue import kind_called, load_catalogue


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("A100-SXM4-40GB", "nvidia-a100-40gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-40gb-sxm"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-80gb-sxm"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-sxm"),
        ("NVIDIA H200", "nvidia-h200-141gb-sxm"),
        ("Tesla V100-SXM2-32GB", "nvidia-v100-32gb-sxm"),
        ("Tesla T4", "nvidia-t4-16gb-pcie"),
        ("AMD Instinct MI300X OAM", "amd-mi300x"),
        ("AMD Instinct MI300X", "amd-mi300x"),
        ("NVIDIA L40S", "nvidia-l40s"),
        ("NVIDIA L40", "nvidia-l40-48gb-pcie"),
        ("NVIDIA H200 NVL", ""),
        ("NVIDIA GeForce RTX 4090 D", ""),
        ("NVIDIA", ""),
        ("", ""),
    ],
)
def test_a_drivers_name_is_its_kind_or_none(name: str, kind: str) -> None:
    assert kind_called(name, load_catalogue()) == kind
