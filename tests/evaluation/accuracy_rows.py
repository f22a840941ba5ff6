"""Tables of measured runs for tests, written here: no row is anybody's measurement."""

from __future__ import annotations

import csv
from pathlib import Path

GPT = {
    "source": "made-up",
    "source_ref": "tests",
    "model": "gpt-small",
    "layers": "4",
    "hidden": "1024",
    "ffn_hidden": "4096",
    "heads": "16",
    "kv_heads": "16",
    "vocab": "50257",
    "seq": "1024",
    "num_experts": "",
    "gpu": "A100-80GB-SXM",
    "gpus": "16",
    "gpus_per_node": "8",
    "intra_bw_note": "NVLink3",
    "inter_bw_note": "8x HDR-200Gb IB per node",
    "tp": "2",
    "pp": "2",
    "vpp": "1",
    "cp": "1",
    "ep": "1",
    "dp": "4",
    "micro_batch": "1",
    "global_batch": "32",
    "dtype": "fp16",
    "recompute": "full",
    "seq_parallel": "0",
    "dist_opt": "0",
    "other": "",
    "step_time_s": "0.5",
    "peak_mem_gib": "",
    "step_time_kind": "published",
}


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
