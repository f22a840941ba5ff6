"""Ceilings of devices, and shapes of models, that a file of measurements only names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from hetplan.cluster.catalogue import kind_called, load_catalogue
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


@lru_cache(maxsize=256)
def known_device(label: str) -> KnownDevice | None:
    """The device of the catalogue that a file's label means; None where it means none.

    The label is a kind, a driver's name, or some of a kind's words, as in `A100-40`, `a100_pcie` or
    `RTX-3090`; of several kinds with these words, the SXM one and the smallest memory is meant. A
    label of several devices (`RTX-3090+Titan-RTX`) is none.
    """
    kinds = _catalogue()
    called = label.lower() if label.lower() in kinds else kind_called(label, kinds.values())
    words = re.findall(r"[a-z0-9]+", label.lower().partition("(")[0])
    if not called and words and "+" not in label:
        fitting = [kind for kind in kinds if _has_words(kind, words)]
        called = min(fitting, key=lambda kind: ("sxm" not in kind, len(kind), kind), default="")
    return _of_kind(kinds[called]) if called else None


def _has_words(kind: str, words: Sequence[str]) -> bool:
    """Whether every word is one of the kind's; `40` also means `40gb`, `gh` also `gh200`."""
    parts = kind.split("-")
    parts += [one + two for one, two in pairwise(parts)]  # `2080ti`
    return all(
        any(
            part == word or (part.startswith(word) and (word.isdecimal() or word.isalpha()))
            for part in parts
        )
        for word in words
    )


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
