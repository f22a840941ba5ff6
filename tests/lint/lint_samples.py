"""Measurements that obey physics, as the files that lint reads: a random device law and 3 % noise.

`Bundle.draw(seed)` makes them; a test damages one part and writes the files.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetplan.files.encoding import encode
from hetplan.lint.evidence import known_device
from hetplan.profiling.samples import LayerSample, LinkSample, Provenance, header, row
from hetplan.profiling.store import SCHEMA as PROVENANCE_SCHEMA

NOISE = 0.03
DEVICES = ("A100-40", "V100-16")
MICROBATCHES = (1, 2, 4, 8)
Rows = list[dict[str, Any]]


def noisy(value: float, random_: random.Random) -> float:
    """The value times exp(N(0, NOISE)), at most three deviations away."""
    return value * math.exp(max(-3.0, min(3.0, random_.gauss(0.0, 1.0))) * NOISE)


def timed(sample: Any, seconds: float) -> Any:
    """The sample with this median, and quantiles near it."""
    return replace(
        sample,
        median_seconds=seconds,
        p10_seconds=seconds * 0.97,
        p90_seconds=seconds * 1.03,
    )


@dataclass
class Bundle:
    """Tables as lists of rows and documents as plain data; the files' names do not matter."""

    collectives: Rows = field(default_factory=list)
    cluster: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    """Never drawn: a job is right or wrong beside a cluster only."""
    layer_samples: list[LayerSample] = field(default_factory=list)
    other_samples: list[LayerSample] = field(default_factory=list)
    link_samples: list[LinkSample] = field(default_factory=list)

    @classmethod
    def draw(cls, seed: int, *parts: str) -> Bundle:
        """The named parts, each from its own device law; none named: all of them."""
        bundle = cls()
        for name in parts or tuple(DRAWN):
            # Text seeds a generator the same way on every platform.
            if name in DRAWN:
                setattr(bundle, name, DRAWN[name](random.Random(f"{name} {seed}")))
        bundle.other_samples = [
            timed(sample, sample.median_seconds * 1.05) for sample in bundle.layer_samples
        ]
        return bundle

    def write(self, folder: Path, *parts: str) -> None:
        """The named parts as files; none named: all of them."""
        for name in parts or tuple(self.__dataclass_fields__):
            value = getattr(self, name)
            if not value:
                continue
            if name in ("layer_samples", "other_samples", "link_samples"):
                _write_store(folder / name, value)
            elif isinstance(value, list):
                (folder / f"{name}.csv").write_text(_csv(value), encoding="utf-8")
            else:
                (folder / f"{name}.json").write_text(json.dumps(value, indent=1), encoding="utf-8")


def _csv(rows: Rows) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _write_store(folder: Path, samples: list[Any]) -> None:
    folder.mkdir()
    provenance = Provenance(
        device=samples[0].device if isinstance(samples[0], LayerSample) else "a-device",
        device_name="A device",
        backend="cuda",
        measured_on="2026-01-01",
        hetplan_version="0",
        torch_version="2.13",
        driver=folder.name,
        threads=0,
        paced="",
        command="hetplan profile",
    )
    (folder / "provenance.json").write_text(encode(provenance, schema=PROVENANCE_SCHEMA))
    name = "layers.csv" if isinstance(samples[0], LayerSample) else "links.csv"
    lines = [header(type(samples[0])), *(row(sample) for sample in samples)]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _collectives(random_: random.Random) -> Rows:
    rows: Rows = []
    for device in DEVICES:
        known = known_device(device)
        assert known is not None
        speed = known.link_bytes_per_second * random_.uniform(0.3, 0.85)
        latency = random_.uniform(5e-6, 50e-6)
        for operation in ("all_reduce", "all_gather"):
            for ranks in (2, 4, 8):
                share = (ranks - 1) / ranks * (2 if operation == "all_reduce" else 1)
                for power in range(12, 31):
                    size = 2**power
                    seconds = noisy(latency * ranks + share * size / speed, random_)
                    micro = round(seconds * 1e6, 2)
                    rows.append(
                        {
                            "source": "drawn",
                            "gpu": device,
                            "op": operation,
                            "ranks": ranks,
                            "scope": "intra",
                            "size_bytes": size,
                            "time_us": micro,
                            "busbw_GBps": round(share * size / (micro * 1e3), 6),
                        }
                    )
    return rows


def _layer_samples(random_: random.Random) -> list[LayerSample]:
    rate, found = random_.uniform(0.5e12, 200e12), []
    for hidden in (512, 2048):
        for size in MICROBATCHES:
            for tp in (1, 2):
                for layer in ("embedding", "transformer", "head"):
                    per_token = {
                        "embedding": 0.0,
                        "transformer": 24.0 * hidden * hidden,
                        "head": 64e3 * hidden,
                    }[layer]
                    flops = size * 2048 * per_token
                    for phase, times in (("forward", 1.0), ("backward", 2.05)):
                        median = noisy(times * (2e-3 + flops / tp / rate), random_)
                        activations = 17.0 * size * 2048 * hidden * 2 if phase == "forward" else 0.0
                        found.append(
                            LayerSample(
                                device="nvidia-a100-40gb-sxm",
                                architecture="gpt",
                                layer=layer,
                                phase=phase,
                                precision="bfloat16",
                                hidden_size=hidden,
                                ffn_hidden_size=4 * hidden,
                                num_attention_heads=8,
                                num_kv_heads=8,
                                head_dim=hidden // 8,
                                vocab_size=32000,
                                sequence_length=2048,
                                microbatch_size=size,
                                tp=tp,
                                median_seconds=median,
                                p10_seconds=median * 0.97,
                                p90_seconds=median * 1.03,
                                repeats=50,
                                outliers=1,
                                steady=True,
                                activation_bytes=activations,
                                peak_memory_bytes=activations,
                                clock_hertz=1.4e9 * random_.uniform(0.98, 1.02),
                            )
                        )
    return found


def _link_samples(random_: random.Random) -> list[LinkSample]:
    speed, latency = random_.uniform(1e9, 100e9), random_.uniform(5e-6, 1e-3)
    found = []
    for power in range(10, 31, 2):
        median = noisy(latency + 2**power / speed, random_)
        found.append(
            LinkSample(
                link="a-link",
                operation="all_reduce",
                backend="nccl",
                group_size=2,
                message_bytes=2**power,
                median_seconds=median,
                p10_seconds=median * 0.97,
                p90_seconds=median * 1.03,
                repeats=50,
                outliers=1,
            )
        )
    return found


def _cluster(random_: random.Random) -> dict[str, Any]:
    """Two nodes of H100: 18 links of 25 GB/s in a node, a card for each device between nodes."""
    inside, card = random_.uniform(300, 450), random_.choice((100, 200, 400))
    island = {
        "name": "h100",
        "device": "nvidia-h100-80gb-sxm",
        "nodes": 2,
        "devices_per_node": 8,
        "intra_node": {"bandwidth": f"{inside:.4g} GB/s", "latency": "3 us"},
        "inter_node": {"bandwidth": f"{card} Gbit/s", "latency": "5 us"},
    }
    regions = [{"name": "here", "islands": [island]}]
    return {"schema": "hetplan.cluster/2", "name": "two-nodes", "regions": regions}


DRAWN: dict[str, Callable[[random.Random], Any]] = {
    "collectives": _collectives,
    "cluster": _cluster,
    "layer_samples": _layer_samples,
    "link_samples": _link_samples,
}
