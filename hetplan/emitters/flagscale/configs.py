"""How do the arguments stand in FlagScale's YAML, and how does its runner read them back?

FlagScale takes two configurations (examples/aquila/conf): the experiment (hosts, environment,
runner) and what is trained, in sections `system`, `model` and `data`. Its runner puts the three
together and flattens them (flagscale/runner/utils.py, flatten_dict_to_args): names of nested
sections are dropped, `_` becomes `-`, lists become values behind a flag, true a flag alone, false
nothing. A value of null would become the word None, so none is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetplan.emitters.quoting import FOLDER

FOLDER_VARIABLE = "HETPLAN_FOLDER"
FOLDER_OF_YAML = f"${{oc.env:{FOLDER_VARIABLE}}}"
"""OmegaConf's words for the variable that holds the emitted folder's place."""

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", re.ASCII)
_SECTIONS = (
    ("data", re.compile(r"data-path|split|mock-data|.*tokenizer.*|.*vocab.*")),
    (
        "model",
        re.compile(
            r"num-layers|hidden-size|ffn-hidden-size|swiglu|normalization|group-query-attention|"
            r"num-query-groups|num-attention-heads|kv-channels|position-embedding-type|"
            r"max-position-embeddings|seq-length|untie-.*|.*bias.*|.*dropout|window-.*|moe-.*|"
            r"num-experts|mtp-.*|multi-latent-.*|q-lora-rank|kv-lora-rank|qk-.*|v-head-dim|rope-.*|"
            r"no-rope-.*|rotary-.*|use-rope-scaling|norm-epsilon|mscale.*|train-iters|eval-.*|"
            r"global-batch-size|micro-batch-size|lr|lr-.*|optimizer|clip-grad|sgd-.*|seed"
        ),
    ),
)
_NESTED = (
    ("hetero", re.compile(r"enable-hetero|hetero-.*|expert-tensor-.*-mesh|use-partial-.*")),
    ("recompute", re.compile(r"recompute-.*")),
    ("precision", re.compile(r"bf16|fp16|fp8-.*|fp4-.*|.*grads.*|grad-reduce-.*")),
    ("checkpoint", re.compile(r"save|save-interval|load|ckpt-format")),
    ("logging", re.compile(r"log-.*|timing-.*|no-barrier-.*")),
)
"""Sections inside `system`; everything else stands in it directly."""


def train_config(arguments: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """The arguments as the sections that FlagScale flattens."""
    found: dict[str, Any] = {"system": {}, "model": {}, "data": {}}
    for flag, *values in arguments:
        name = flag.removeprefix("--")
        home = found[next((key for key, those in _SECTIONS if those.fullmatch(name)), "system")]
        inner = next((key for key, those in _NESTED if those.fullmatch(name)), None)
        if home is found["system"] and inner is not None:
            home = home.setdefault(inner, {})
        home[name.replace("-", "_")] = _value(name, values)
    return found


_LISTS = re.compile(
    r"hetero-(?:process-meshes|pipeline-layer-split|device-types)|data-path|.*-mesh|.*-micro-batch"
)
_ROWS = re.compile(r".*-per-stage-micro-batch")


def _value(name: str, values: Sequence[str]) -> Any:
    if not values:
        return True
    read = json.loads if _ROWS.fullmatch(name) else _scalar
    found = [read(each) for each in values]
    return found if len(found) > 1 or _LISTS.fullmatch(name) else found[0]


def _scalar(text: str) -> Any:
    if _NUMBER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text) and repr(float(text)) == text:
        return float(text)
    return text.replace(FOLDER, FOLDER_OF_YAML)


def flatten(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The arguments of sections, in their order, as FlagScale's runner makes them."""
    for name, value in config.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            yield from flatten(value)
        elif isinstance(value, list):
            yield flag, *(str(each) for each in value)
        elif value is True:
            yield (flag,)
        elif value is not False:
            yield flag, str(value)


def arguments_of(config: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Every argument of the three sections, `{folder}` for the folder."""
    merged: dict[str, Any] = {}
    for section in ("system", "model", "data"):
        merged.update(config[section])
    return tuple(
        tuple(word.replace(FOLDER_OF_YAML, FOLDER) for word in each) for each in flatten(merged)
    )
