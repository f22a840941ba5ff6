from dataclasses import replace

from hetplan.profiling.samples import LayerSample, LinkSample, Provenance

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
