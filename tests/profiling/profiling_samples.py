from dataclasses import replace

from typer.testing import CliRunner

from hetplan.cli.main import app
from hetplan.profiling.samples import LayerSample, LinkSample, OperatorSample, Provenance

LAYER = LayerSample(
    device="cpu",
    architecture="gpt",
    layer="transformer",
    phase="forward",
    precision="float32",
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=64,
    sequence_length=16,
    microbatch_size=1,
    tp=1,
    median_seconds=0.001,
    p10_seconds=0.0009,
    p90_seconds=1 / 3,
    repeats=9,
    outliers=0,
    steady=True,
    activation_bytes=0.0,
    peak_memory_bytes=0.0,
    clock_hertz=0.0,
)
LINK = LinkSample(
    link="long, and thin",
    operation="send_recv",
    backend="gloo",
    group_size=2,
    message_bytes=4096,
    median_seconds=0.01,
    p10_seconds=0.01,
    p90_seconds=0.02,
    repeats=20,
    outliers=1,
)
PROVENANCE = Provenance(
    device="cpu",
    device_name="A processor",
    backend="cpu",
    measured_on="2026-01-02",
    hetplan_version="0.1.0",
    torch_version="2.13.0",
    driver="Linux 6.1",
    threads=1,
    paced="",
    command="hetplan profile",
)


def layer(**changes) -> LayerSample:
    return replace(LAYER, **changes)


PRODUCT = OperatorSample(
    device="cpu",
    operator="matrix_product",
    phase="weight_gradient",
    precision="bfloat16",
    output_precision="float32",
    batch=1,
    m=1536,
    n=5120,
    k=4096,
    median_seconds=0.00033,
    p10_seconds=0.00032,
    p90_seconds=1 / 3,
    repeats=20,
    outliers=1,
)
NORM = replace(
    PRODUCT, operator="norm", phase="forward", output_precision="bfloat16", m=64, n=128, k=0
)
CLUSTER = """schema: hetplan.cluster/1
name: small
regions:
  - name: here
    islands:
      - name: cores
        device: cpu
        nodes: 1
        devices_per_node: 2
        memory: 1 GiB
        intra_node:
          bandwidth: 1 GB/s
          latency: 50 us
          transport: host-staged
          samples: lo
"""
MODEL = """schema: hetplan.model/1
name: tiny
architecture: gpt
num_layers: 2
hidden_size: 32
ffn_hidden_size: 64
num_attention_heads: 4
num_kv_heads: 4
head_dim: 8
vocab_size: 64
max_sequence_length: 16
"""
JOB = """schema: hetplan.job/1
name: tiny
global_batch_size: 4
sequence_length: 16
precision: float32
optimizer: sgd
target: native
"""


def invoke(*arguments, code: int = 0):
    """`hetplan profile` with these arguments."""
    result = CliRunner().invoke(app, ["profile", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result
