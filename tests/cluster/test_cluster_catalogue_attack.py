"""Figures of well-known kinds, typed in again from their vendors' documents."""

from __future__ import annotations

import pytest

from hetplan.cluster.catalogue import load_catalogue

TERA, GIGA = 1e12, 1e9


@pytest.mark.parametrize(
    ("kind", "dtype", "peak", "bandwidth"),
    [
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
    ],
)
def test_rate_and_memory_bandwidth(kind: str, dtype: str, peak: float, bandwidth: float) -> None:
    """TFLOP/s and GB/s."""
    (found,) = (each for each in load_catalogue() if each.kind == kind)
    assert found.peak(dtype) == pytest.approx(peak * TERA)
    assert found.memory_bandwidth_bytes_per_second == pytest.approx(bandwidth * GIGA)
