"""Trainer options in the memory of a stage, against the paper's table and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memory_cases import LLAMA, MEGATRON_JOB, layout

from hetplan.cost.memory.activations import cut_of, transformer_bytes
from hetplan.cost.memory.device import device_memory, gradient_bytes_per_parameter
from hetplan.cost.memory.values import job_memory
from hetplan.job.spec import Job, Precision, TrainerOptions
from hetplan.model.spec import Architecture, plain_model
from hetplan.plans.plan import Recompute, RecomputeGranularity, RecomputeModule

OLD = TrainerOptions(fused_attention=False, attention_dropout=True, hidden_dropout=True)
S, H, HEADS = 2048, 1024, 16
GPT = plain_model(
    name="gpt",
    architecture=Architecture.GPT,
    num_layers=4,
    hidden_size=H,
    ffn_hidden_size=4 * H,
    num_attention_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=H // HEADS,
    vocab_size=51200,
    max_sequence_length=S,
)


def asked(options: TrainerOptions = TrainerOptions(), **changes: object) -> Job:  # noqa: B008
    return replace(MEGATRON_JOB, trainer=options, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "core_again", "per_token"),
    [
        # arXiv 2205.05198, table 2: s b h times these, divided by s b h.
        (1, False, False, 34 + 5 * HEADS * S / H),
        (4, False, False, 10 + 24 / 4 + 5 * HEADS * S / (H * 4)),
        (4, True, False, 34 / 4 + 5 * HEADS * S / (H * 4)),
        (4, True, True, 34 / 4),
    ],
)
def test_a_layer_keeps_what_the_papers_table_says(
    tp: int, sequence_parallel: bool, core_again: bool, per_token: float
) -> None:
    recompute = Recompute()
    if core_again:
        recompute = Recompute(
            granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.CORE_ATTENTION,)
        )
    cut = cut_of(
        layout(tp=tp, etp=tp, sequence_parallel=sequence_parallel, recompute=recompute), S, 2, 1.0
    )
    # The paper leaves out the few bytes of the norms' statistics.
    habits = replace(job_memory(asked(OLD)), norm_statistics=False)
    found = transformer_bytes(GPT.layer_runs[0].layer, H, cut, habits)
    assert found.kept == pytest.approx(per_token * H)


def test_narrow_gradients_are_kept_and_copied_while_they_are_used() -> None:
    narrow = asked(TrainerOptions(gradient_precision=Precision.BFLOAT16))
    assert (gradient_bytes_per_parameter(asked()), gradient_bytes_per_parameter(narrow)) == (4, 2)
    place = layout(1, 5, microbatch_size=1, num_microbatches=1, num_stages=1, stage=0)
    wide, half = (device_memory(LLAMA, each, place, 1e12) for each in (asked(), narrow))
    assert half.gradient_bytes == wide.gradient_bytes / 2
    parameters = wide.gradient_bytes / 4
    # Four bytes of a float32 copy, where they are more than the activations, which are gone then.
    most = max(wide.activation_bytes + wide.temporary_bytes, 4 * parameters)
    assert half.activation_bytes + half.temporary_bytes == pytest.approx(most)
