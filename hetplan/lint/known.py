"""What lint knows of devices and models that a file only names.

A file says `A100-40`, `a100_pcie` or `RTX-3090`: here stands which kind of the catalogue that is,
and how far above its quoted rates a device of it can be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.devices import DeviceKind
from hetplan.job.spec import Precision
from hetplan.model.spec import Architecture, ModelSpec, plain_model

DATA_CENTRE_MARGIN = 1.03  # peaks are quoted at the highest clock; 3 % for rounded times
DESK_MARGIN = 1.25  # peaks are quoted at the boost clock, which such cards exceed (RTX 3090: 1.24x)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDevice:
    """Ceilings of a device; 0 where a figure is not known."""

    name: str
    float32_flops_per_second: float
    tensor_float32_flops_per_second: float
    half_flops_per_second: float
    """float16 or bfloat16 with float32 accumulation; dense, as all rates here."""
    link_bytes_per_second: float
    """All direct links to other devices together, one direction."""
    memory_bytes_per_second: float
    margin: float
    """How much above its quoted peak a rate may be."""

    def peak(self, precision: str) -> float:
        """Operations per second that nothing of this precision exceeds; 0: not known."""
        if precision == "float32":
            return self.float32_flops_per_second * self.margin
        known = precision in ("float16", "bfloat16")
        return self.half_flops_per_second * self.margin if known else 0.0


_KINDS = (
    # The first that fits; the larger memory before the smaller one of the same name.
    (r"v100.*32", "nvidia-v100-32gb-sxm"),
    (r"v100", "nvidia-v100-16gb-sxm"),
    (r"a100.*80.*pcie", "nvidia-a100-80gb-pcie"),
    (r"a100.*pcie", "nvidia-a100-40gb-pcie"),
    (r"a100.*80", "nvidia-a100-80gb-sxm"),
    (r"a100", "nvidia-a100-40gb-sxm"),
    (r"gh-?96|gh-?200", "nvidia-gh200-96gb"),
    (r"gb200", "nvidia-gb200-186gb"),
    (r"b200", "nvidia-b200-180gb-sxm"),
    (r"h200", "nvidia-h200-141gb-sxm"),
    (r"h100.*pcie", "nvidia-h100-80gb-pcie"),
    (r"h100", "nvidia-h100-80gb-sxm"),
    (r"rtx.?3090", "nvidia-rtx-3090-24gb"),
    (r"rtx.?2080.?ti", "nvidia-rtx-2080-ti-11gb"),
    (r"titan.?rtx", "nvidia-titan-rtx-24gb"),
)
"""Labels that tables of measurements use, and the kind of the catalogue that each means."""

# NVIDIA Turing architecture whitepaper (WP-09183-001), Founders Edition, which the catalogue lacks:
# float16 with float32 accumulation, NVLink in one direction.
_RTX_2080 = KnownDevice(
    name="RTX 2080",
    float32_flops_per_second=10.6e12,
    tensor_float32_flops_per_second=0.0,
    half_flops_per_second=42.4e12,
    link_bytes_per_second=25e9,
    memory_bytes_per_second=448e9,
    margin=DESK_MARGIN,
)


@lru_cache(maxsize=256)
def known_device(label: str) -> KnownDevice | None:
    """The device that a file's label means; None where it is not one that lint knows.

    A label of several devices (`RTX-3090+Titan-RTX`) is none.
    """
    text = label.lower()
    if "+" in text:
        return None
    wanted = next((name for pattern, name in _KINDS if re.search(pattern, text)), "")
    kinds = _catalogue()
    kind = kinds.get(text) or kinds.get(wanted)
    if kind is not None:
        return _of_kind(kind)
    return _RTX_2080 if re.search(r"rtx.?2080", text) else None


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, DeviceKind]:
    return {kind.kind: kind for kind in load_catalogue()}


def _of_kind(kind: DeviceKind) -> KnownDevice:
    rates = dict(kind.peak_flops_per_second)
    link = kind.scale_up.bandwidth_bytes_per_second if kind.scale_up is not None else 0.0
    return KnownDevice(
        name=kind.kind,
        float32_flops_per_second=rates.get("float32", 0.0),
        tensor_float32_flops_per_second=rates.get("tf32", 0.0),
        half_flops_per_second=max(rates.get("float16", 0.0), rates.get("bfloat16", 0.0)),
        link_bytes_per_second=link,
        memory_bytes_per_second=kind.memory_bandwidth_bytes_per_second,
        margin=DESK_MARGIN if "-rtx-" in kind.kind else DATA_CENTRE_MARGIN,
    )


def fastest_link() -> float:
    """Bytes per second, one direction, of the fastest links of any catalogue device."""
    fabrics = [kind.scale_up for kind in _catalogue().values()]
    return max(fabric.bandwidth_bytes_per_second for fabric in fabrics if fabric is not None)


def precision_of(label: str) -> str:
    """`float32`, `float16` or `bfloat16`; empty where the label says none of them."""
    text = label.lower()
    if re.search(r"fp16\s*=\s*false", text):
        return "float32"
    for name, pattern in (
        ("bfloat16", r"\b(bf16|bfloat16)\b"),
        ("float16", r"\b(fp16|float16|half)\b"),
        ("float32", r"\b(fp32|float32)\b"),
    ):
        if re.search(pattern, text):
            return name
    return ""


def element_bytes(precision: str, unknown: int) -> int:
    """Bytes of one element in a number format; `unknown` of a name that is none."""
    try:
        return Precision(precision).bytes_per_element
    except ValueError:
        return unknown


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int) -> ModelSpec:
    return plain_model(
        name=name,
        architecture=Architecture.GPT,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_sequence_length=2048,
    )


_MODELS = (
    # config.json of facebook/opt-350m, facebook/opt-30b, EleutherAI/gpt-neo-2.7B,
    # meta-llama/Meta-Llama-3-8B.
    (r"opt-?350", _gpt("opt-350m", 24, 1024, 16, 50272)),
    (r"opt-?30(?!\d)", _gpt("opt-30b", 48, 7168, 56, 50272)),
    (r"gpt-?neo-?2", _gpt("gpt-neo-2.7b", 32, 2560, 20, 50257)),
    (
        r"llama-?3-8",
        plain_model(
            name="llama-3-8b",
            architecture=Architecture.LLAMA,
            num_layers=32,
            hidden_size=4096,
            ffn_hidden_size=14336,
            num_attention_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128256,
            max_sequence_length=8192,
        ),
    ),
)


def known_model(name: str, given: Iterable[ModelSpec] = ()) -> ModelSpec | None:
    """The model of this name among those given, then among those that lint knows."""
    for model in given:
        if model.name.lower() == name.lower():
            return model
    return next((model for pattern, model in _MODELS if re.search(pattern, name.lower())), None)
