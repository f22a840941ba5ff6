"""Tables of runs and unit data for tests; no row is anybody's measurement."""

from __future__ import annotations

import csv
import json
from pathlib import Path

GPT = dict(
    part.split("=", 1)
    for part in [
        "source=made-up",
        "source_ref=tests",
        "model=gpt-small",
        "layers=4",
        "hidden=1024",
        "ffn_hidden=4096",
        "heads=16",
        "kv_heads=16",
        "vocab=50257",
        "seq=1024",
        "num_experts=",
        "gpu=A100-80GB-SXM",
        "gpus=16",
        "gpus_per_node=8",
        "intra_bw_note=NVLink3",
        "inter_bw_note=8x HDR-200Gb IB per node",
        "tp=2",
        "pp=2",
        "vpp=1",
        "cp=1",
        "ep=1",
        "dp=4",
        "micro_batch=1",
        "global_batch=32",
        "dtype=fp16",
        "recompute=full",
        "seq_parallel=0",
        "dist_opt=0",
        "other=",
        "step_time_s=0.5",
        "peak_mem_gib=",
        "step_time_kind=published",
    ]
)


def write_runs(folder: Path, *rows: dict[str, str], name: str = "runs.csv") -> Path:
    """`folder/runs/name` with these changes to `GPT`, one row each."""
    path = folder / "runs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys([*GPT, *(key for row in rows for key in row)]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(GPT | row for row in rows)
    return folder


ACESO = "eth-easl/sailor Aceso profiler"
LAYER_HEADER = "source,dtype,gpu,model,op,mbs,tp,algo,fwd_us,bwd_us,weights_mb,act_mb,layer"
COLLECTIVE_HEADER = "source,gpu,op,ranks,scope,size_bytes,time_us,busbw_GBps"
EFFICIENCY_HEADER = "source,gpu,op,peak_tflops,default_eff,shape,efficiency"
SHAPES = "Sailor Aceso profiler A100-40 ({} shapes)"


def layer_row(op: str, forward: object, backward: object, **others: object) -> str:
    values = {"dtype": "fp16", "gpu": "A100-40", "model": "OPT-350", "mbs": 1, "tp": 1, "algo": 0}
    values |= others
    head = ",".join(str(values[name]) for name in ("dtype", "gpu", "model"))
    tail = ",".join(str(values[name]) for name in ("mbs", "tp", "algo"))
    return f"{ACESO},{head},{op},{tail},{forward},{backward},0,0,"


def collective_row(
    source: str, op: str, ranks: object, size: object, microseconds: object, bandwidth: object,
    gpu: str = "A100-40", scope: str = "intra",
) -> str:  # fmt: skip
    return f"{source},{gpu},{op},{ranks},{scope},{size},{microseconds},{bandwidth}"


def write_table(folder: Path, name: str, header: str, *rows: str) -> None:
    (folder / "unit").mkdir(parents=True, exist_ok=True)
    (folder / "unit" / name).write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")


def write_profile(
    folder: Path, model: str, gpu: str, times: dict[tuple[int, int], tuple[float, float, float]]
) -> None:
    """A Sailor profile of OPT-350's 24 layers: (microbatch, tp) to embedding, layer, head times."""
    data: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (size, tp), (embedding, layer, head) in times.items():
        rows = [[embedding, embedding, 0.001]]
        rows += [[layer, 2 * layer, 0.001]] * 24
        rows.append([head, 2 * head, 0.001])
        data.setdefault(str(size), {})[str(tp)] = {str(at): row for at, row in enumerate(rows)}
    path = folder / "sailor" / "layer_profiles" / model / gpu / "profile.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
