"""Megatron-LM's flags that hetplan understands.

`FLAGS` is the one place that says what a flag takes and which value of hetplan's model, job or plan
it stands for; readers, rules and the list of printed arguments use it. Sources, read at d98e8a64:
megatron/training/arguments.py, megatron/core/transformer/transformer_config.py and
megatron/training/argument_utils.py, which makes flags of the fields of configuration classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Takes(StrEnum):
    """What follows a flag."""

    SWITCH = "switch"
    """Nothing."""
    OFF = "off"
    """Nothing; the flag makes its argument false."""
    COUNT = "count"
    """One whole number."""
    NUMBER = "number"
    WORD = "word"
    WORDS = "words"
    """One word or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag."""

    name: str
    """Without leading dashes."""
    takes: Takes
    meaning: str
    """The value of hetplan's that it gives, as `plan: tp`."""
    argument: str
    """Name in the list of arguments that Megatron-LM prints."""


_TABLE = """
tensor-model-parallel-size              count   plan: tp
pipeline-model-parallel-size            count   plan: stages
context-parallel-size                   count   plan: cp
expert-model-parallel-size              count   plan: ep
expert-tensor-parallel-size             count   plan: etp
num-layers-per-virtual-pipeline-stage   count   plan: virtual stages
num-virtual-stages-per-pipeline-rank    count   plan: virtual stages  virtual_pipeline_model_parallel_size
microbatch-group-size-per-virtual-pipeline-stage  count  plan: order of virtual stages
pipeline-model-parallel-layout          word    plan: layers of stages
decoder-first-pipeline-num-layers       count   plan: layers of the first stage
decoder-last-pipeline-num-layers        count   plan: layers of the last stage
account-for-embedding-in-pipeline-split switch  plan: layers of the first stage
account-for-loss-in-pipeline-split      switch  plan: layers of the last stage
standalone-embedding-stage              switch  plan: layers of the first stage
sequence-parallel                       switch  plan: sequence_parallel
use-tp-pp-dp-mapping                    switch  plan: order of ranks
use-distributed-optimizer               switch  plan: optimizer shards
num-distributed-optimizer-instances     count   plan: optimizer shards
use-precision-aware-optimizer           switch  plan: optimizer state
optimizer-cpu-offload                   switch  plan: optimizer offload
optimizer-offload-fraction              number  plan: optimizer offload
overlap-grad-reduce                     switch  plan: overlap.reduction
overlap-param-gather                    switch  plan: overlap.gathering
overlap-param-gather-with-optimizer-step  switch  plan: overlap.gathering
tp-comm-overlap                         switch  plan: overlap.tensor_parallel
no-overlap-p2p-communication            off     plan: overlap.send  overlap_p2p_comm
recompute-granularity                   word    plan: recompute
recompute-method                        word    plan: recompute
recompute-num-layers                    count   plan: recompute
recompute-modules                       words   plan: recompute
recompute-activations                   switch  plan: recompute
distribute-saved-activations            switch  plan: recompute
micro-batch-size                        count   plan: microbatch_size
global-batch-size                       count   job: global_batch_size
rampup-batch-size                       words   job: global_batch_size
step-batch-size-schedule                words   job: global_batch_size
decrease-batch-size-if-needed           switch  job: global_batch_size
seq-length                              count   job: sequence_length
encoder-seq-length                      count   job: sequence_length
bf16                                    switch  job: precision
fp16                                    switch  job: precision
optimizer                               word    job: optimizer
clip-grad                               number  job: gradient_clipping
attention-backend                       word    job: trainer.fused_attention
attention-dropout                       number  job: trainer.attention_dropout
hidden-dropout                          number  job: trainer.hidden_dropout
cross-entropy-loss-fusion               switch  job: trainer.fused_loss
no-gradient-accumulation-fusion         off     job: trainer.fused_accumulation  gradient_accumulation_fusion
cp-comm-type                            words   job: trainer.context_exchange
grad-reduce-in-bf16                     switch  job: trainer.gradient_precision
accumulate-allreduce-grads-in-fp32      switch  job: trainer.gradient_precision
fp8-format                              word    job: trainer.product_format  fp8
fp8-hybrid                              switch  job: trainer.product_format
fp8-e4m3                                switch  job: trainer.product_format
fp8-recipe                              word    job: trainer.product_format
fp8-param-gather                        switch  job: trainer.product_format
fp4-format                              word    job: trainer.product_format  fp4
distributed-timeout-minutes             count   run: timeout of collectives
ckpt-format                             word    run: checkpoints
save                                    word    run: checkpoints
load                                    word    run: checkpoints
save-interval                           count   run: checkpoints
num-layers                              count   model: num_layers
encoder-num-layers                      count   model: num_layers
hidden-size                             count   model: hidden_size
ffn-hidden-size                         count   model: ffn_hidden_size
num-attention-heads                     count   model: num_attention_heads
group-query-attention                   switch  model: num_kv_heads
num-query-groups                        count   model: num_kv_heads
kv-channels                             count   model: head_dim
add-qkv-bias                            switch  model: qkv_bias
disable-bias-linear                     off     model: mlp_bias, output_bias  add_bias_linear
qk-layernorm                            switch  model: qk_norm
window-size                             words   model: window
window-attn-skip-freq                   words   model: window
multi-latent-attention                  switch  model: latent_attention
q-lora-rank                             count   model: latent_attention.query_rank
kv-lora-rank                            count   model: latent_attention.kv_rank
qk-head-dim                             count   model: latent_attention.nope_head_dim
qk-pos-emb-head-dim                     count   model: latent_attention.rope_head_dim
v-head-dim                              count   model: latent_attention.value_head_dim
normalization                           word    model: architecture
norm-epsilon                            number  model: norm_epsilon
layernorm-epsilon                       number  model: norm_epsilon
swiglu                                  switch  model: gated_mlp, activation
openai-gelu                             switch  model: activation
squared-relu                            switch  model: activation
quick-geglu                             switch  model: activation
no-bias-gelu-fusion                     off     model: activation  bias_gelu_fusion
vocab-size                              count   model: vocab_size
vocab-file                              word    model: vocab_size
merge-file                              word    model: vocab_size
tokenizer-type                          word    model: vocab_size
padded-vocab-size                       count   model: vocab_size
make-vocab-size-divisible-by            count   model: vocab_size
max-position-embeddings                 count   model: max_sequence_length
position-embedding-type                 word    model: rotary, learned_positions
use-rotary-position-embeddings          switch  model: rotary
rotary-base                             number  model: rotary_base
rotary-percent                          number  model: rotary_fraction
rotary-seq-len-interpolation-factor     number  model: rotary_scaling
use-rope-scaling                        switch  model: rotary_scaling
rope-scaling-factor                     number  model: rotary_scaling
rope-type                               word    model: rotary_scaling
rotary-scaling-factor                   number  model: rotary_scaling
mscale                                  number  model: rotary_scaling
mscale-all-dim                          number  model: rotary_scaling
untie-embeddings-and-output-weights     switch  model: tied_embeddings
mtp-num-layers                          count   model: multi_token_prediction
num-experts                             count   model: experts.num_experts
moe-layer-freq                          words   model: experts of layers
moe-ffn-hidden-size                     count   model: experts.ffn_hidden_size
moe-router-topk                         count   model: experts.experts_per_token
moe-shared-expert-intermediate-size     count   model: experts.shared_ffn_hidden_size
moe-shared-expert-gate                  switch  model: experts.shared_gate
moe-router-score-function               word    model: router.score_function
moe-router-pre-softmax                  switch  model: router.normalized
moe-router-topk-scaling-factor          number  model: router.scaling_factor
moe-router-num-groups                   count   model: router.num_groups
moe-router-group-topk                   count   model: router.groups_per_token
moe-router-enable-expert-bias           switch  model: router.correction_bias
moe-router-load-balancing-type          words   model: router.loss_per_sequence
moe-aux-loss-coeff                      words   model: router.loss_coefficient
overlap-moe-expert-parallel-comm        switch  run: expert-parallel communication
use-torch-fsdp2                         switch  none: torch's FSDP2 inside Megatron-LM
use-megatron-fsdp                       switch  none: Megatron-FSDP's own sharding
use-custom-fsdp                         switch  none: Megatron-FSDP's own sharding
tensor-parallel-num-weight-shards       count   none: weight shards beside tensor parallelism
hybrid-layer-pattern                    word    none: state-space layers between attention layers
hybrid-override-pattern                 word    none: state-space layers between attention layers
is-hybrid-model                         switch  none: state-space layers between attention layers
decoder-num-layers                      count   none: a model with an encoder
num-experts-per-layer                   words   none: experts that differ by layer
heterogeneous-layers-config-path        word    none: layers that differ (write a model file)
yaml-cfg                                word    none: arguments in a YAML file (write them as flags)
use-checkpoint-args                     switch  none: arguments of a checkpoint
use-mp-args-from-checkpoint-args        switch  none: arguments of a checkpoint
"""  # noqa: E501
"""Flag, what it takes, its meaning, and the printed argument where that has another name."""

UNPLANNED = (
    "use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2", "tensor-parallel-num-weight-shards",
    "hybrid-layer-pattern", "hybrid-override-pattern", "encoder-num-layers",
    "num-experts-per-layer", "heterogeneous-layers-config-path", "yaml-cfg",
)  # fmt: skip
"""Flags that change the layout of a run in a way that no plan has."""

RENAMED = {
    "model-parallel-size": "tensor-model-parallel-size",
    "batch-size": "micro-batch-size",
    "checkpoint-activations": "recompute-activations",
}
"""Flags of old versions, which arguments.py refuses, and their names of today."""


def _flags() -> dict[str, Flag]:
    found: dict[str, Flag] = {}
    for line in _TABLE.strip().split("\n"):
        name, takes, rest = line.split(maxsplit=2)
        meaning, _, argument = rest.partition("  ")
        found[name] = Flag(
            name=name,
            takes=Takes(takes),
            meaning=meaning.strip(),
            argument=argument.strip() or name.replace("-", "_"),
        )
    return found


FLAGS = _flags()
