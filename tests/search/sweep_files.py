"""A tiny model, two tiny clusters and a job as files, for sweeps that take moments."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from hetplan.cli.main import app

MODEL = """
schema: hetplan.model/1
name: tiny
architecture: gpt
num_layers: 4
hidden_size: 64
ffn_hidden_size: 256
num_attention_heads: 4
num_kv_heads: 4
vocab_size: 512
max_sequence_length: 128
tied_embeddings: false
"""

CLUSTER = """
schema: hetplan.cluster/2
name: NAME
regions:
  - name: here
    islands:
      - name: a
        device: nvidia-a100-80gb-sxm
        nodes: 2
        devices_per_node: 1
        intra_node: {bandwidth: 100 GB/s, latency: 3 us}
        inter_node: {bandwidth: 10 GB/s, latency: 5 us}
  - name: there
    islands:
      - name: b
        device: amd-mi300x
        nodes: 1
        devices_per_node: 1
        memory: MEMORY
        intra_node: {bandwidth: 100 GB/s, latency: 3 us}
        inter_node: {bandwidth: 10 GB/s, latency: 5 us}
links:
  - between: [a, b]
    bandwidth_shared: 1 GB/s
    latency: 1 ms
    transport: host-staged
"""

JOB = """
schema: hetplan.job/4
name: tiny
global_batch_size: 4
sequence_length: 128
precision: bfloat16
optimizer: adamw
target: megatron
gap: 0.2
pin: {tp: 1, cp: 1, microbatch_size: 1, virtual_stages: 1, recompute: false}
"""

SWEEP = """
schema: hetplan.sweep/1
models: [model.yaml]
clusters: [one.yaml, two.yaml]
jobs: [job.yaml]
global_batch_size: [2, 4]
links:
  - between: [here, there]
    bandwidth: [1 Gbit/s, 100 Gbit/s]
workers: 1
"""


def sweep_files(folder: Path, sweep: str = SWEEP) -> Path:
    """The sweep's file; all others beside it."""
    (folder / "model.yaml").write_text(MODEL)
    for name in ("one", "two"):
        memory = {"one": "192 GB", "two": "100 GB"}[name]
        text = CLUSTER.replace("NAME", name).replace("MEMORY", memory)
        (folder / f"{name}.yaml").write_text(text)
    (folder / "job.yaml").write_text(JOB)
    path = folder / "sweep.yaml"
    path.write_text(sweep)
    return path


def plan_command(folder: Path, *options: str) -> Result:
    """`hetplan plan` of these files, written to p.json; they are there already."""
    (folder / "store").mkdir(exist_ok=True)
    arguments = ["plan", f"--store={folder / 'store'}", f"--out={folder / 'p.json'}"]
    for name, file in (("model", "model"), ("cluster", "one"), ("job", "job")):
        arguments.append(f"--{name}={folder / f'{file}.yaml'}")
    return CliRunner().invoke(app, [*arguments, *options])
