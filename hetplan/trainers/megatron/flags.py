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
    VALUE = "value"
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
tensor-model-parallel-size              value   plan: tp
pipeline-model-parallel-size            value   plan: stages
context-parallel-size                   value   plan: cp
expert-model-parallel-size              value   plan: ep
expert-tensor-parallel-size             value   plan: etp
num-layers-per-virtual-pipeline-stage   value   plan: virtual stages
num-virtual-stages-per-pipeline-rank    value   plan: virtual stages  virtual_pipeline_model_parallel_size
microbatch-group-size-per-virtual-pipeline-stage  value  plan: order of virtual stages
pipeline-model-parallel-layout          value   plan: layers of stages
decoder-first-pipeline-num-layers       value   plan: layers of the first stage
decoder-last-pipeline-num-layers        value   plan: layers of the last stage
account-for-embedding-in-pipeline-split switch  plan: layers of the first stage
account-for-loss-in-pipeline-split      switch  plan: layers of the last stage
standalone-embedding-stage              switch  plan: layers of the first stage
sequence-parallel                       switch  plan: sequence_parallel
use-tp-pp-dp-mapping                    switch  plan: order of ranks
use-distributed-optimizer               switch  plan: optimizer shards
num-distributed-optimizer-instances     value   plan: optimizer shards
use-precision-aware-optimizer           switch  plan: optimizer state
optimizer-cpu-offload                   switch  plan: optimizer offload
optimizer-offload-fraction              value   plan: optimizer offload
overlap-grad-reduce                     switch  plan: overlap.reduction
overlap-param-gather                    switch  plan: overlap.gathering
overlap-param-gather-with-optimizer-step  switch  plan: overlap.gathering
tp-comm-overlap                         switch  plan: overlap.tensor_parallel
no-overlap-p2p-communication            off     plan: overlap.send  overlap_p2p_comm
recompute-granularity                   value   plan: recompute
recompute-method                        value   plan: recompute
recompute-num-layers                    value   plan: recompute
recompute-modules                       value   plan: recompute
recompute-activations                   switch  plan: recompute
distribute-saved-activations            switch  plan: recompute
micro-batch-size                        value   plan: microbatch_size
global-batch-size                       value   job: global_batch_size
rampup-batch-size                       value   job: global_batch_size
step-batch-size-schedule                value   job: global_batch_size
decrease-batch-size-if-needed           switch  job: global_batch_size
seq-length                              value   job: sequence_length
encoder-seq-length                      value   job: sequence_length
bf16                                    switch  job: precision
fp16                                    switch  job: precision
optimizer                               value   job: optimizer
clip-grad                               value   job: gradient_clipping
attention-backend                       value   job: trainer.fused_attention
attention-dropout                       value   job: trainer.attention_dropout
hidden-dropout                          value   job: trainer.hidden_dropout
cross-entropy-loss-fusion               switch  job: trainer.fused_loss
no-gradient-accumulation-fusion         off     job: trainer.fused_accumulation  gradient_accumulation_fusion
cp-comm-type                            value   job: trainer.context_exchange
grad-reduce-in-bf16                     switch  job: trainer.gradient_precision
accumulate-allreduce-grads-in-fp32      switch  job: trainer.gradient_precision
fp8-format                              value   job: trainer.product_format  fp8
fp8-hybrid                              switch  job: trainer.product_format
fp8-e4m3                                switch  job: trainer.product_format
fp8-recipe                              value   job: trainer.product_format
fp8-param-gather                        switch  job: trainer.product_format
fp4-format                              value   job: trainer.product_format  fp4
distributed-timeout-minutes             value   run: timeout of collectives
ckpt-format                             value   run: checkpoints
save                                    value   run: checkpoints
load                                    value   run: checkpoints
save-interval                           value   run: checkpoints
num-layers                              value   model: num_layers
encoder-num-layers                      value   model: num_layers
hidden-size                             value   model: hidden_size
ffn-hidden-size                         value   model: ffn_hidden_size
num-attention-heads                     value   model: num_attention_heads
group-query-attention                   switch  model: num_kv_heads
num-query-groups                        value   model: num_kv_heads
kv-channels                             value   model: head_dim
add-qkv-bias                            switch  model: qkv_bias
disable-bias-linear                     off     model: mlp_bias, output_bias  add_bias_linear
qk-layernorm                            switch  model: qk_norm
window-size                             value   model: window
window-attn-skip-freq                   value   model: window
multi-latent-attention                  switch  model: latent_attention
q-lora-rank                             value   model: latent_attention.query_rank
kv-lora-rank                            value   model: latent_attention.kv_rank
qk-head-dim                             value   model: latent_attention.nope_head_dim
qk-pos-emb-head-dim                     value   model: latent_attention.rope_head_dim
v-head-dim                              value   model: latent_attention.value_head_dim
normalization                           value   model: architecture
norm-epsilon                            value   model: norm_epsilon
layernorm-epsilon                       value   model: norm_epsilon
swiglu                                  switch  model: gated_mlp, activation
openai-gelu                             switch  model: activation
squared-relu                            switch  model: activation
quick-geglu                             switch  model: activation
no-bias-gelu-fusion                     off     model: activation  bias_gelu_fusion
vocab-size                              value   model: vocab_size
vocab-file                              value   model: vocab_size
merge-file                              value   model: vocab_size
tokenizer-type                          value   model: vocab_size
padded-vocab-size                       value   model: vocab_size
make-vocab-size-divisible-by            value   model: vocab_size
max-position-embeddings                 value   model: max_sequence_length
position-embedding-type                 value   model: rotary, learned_positions
use-rotary-position-embeddings          switch  model: rotary
rotary-base                             value   model: rotary_base
rotary-percent                          value   model: rotary_fraction
rotary-seq-len-interpolation-factor     value   model: rotary_scaling
use-rope-scaling                        switch  model: rotary_scaling
rope-scaling-factor                     value   model: rotary_scaling
rope-type                               value   model: rotary_scaling
rotary-scaling-factor                   value   model: rotary_scaling
mscale                                  value   model: rotary_scaling
mscale-all-dim                          value   model: rotary_scaling
untie-embeddings-and-output-weights     switch  model: tied_embeddings
mtp-num-layers                          value   model: multi_token_prediction
num-experts                             value   model: experts.num_experts
moe-layer-freq                          value   model: experts of layers
moe-ffn-hidden-size                     value   model: experts.ffn_hidden_size
moe-router-topk                         value   model: experts.experts_per_token
moe-shared-expert-intermediate-size     value   model: experts.shared_ffn_hidden_size
moe-shared-expert-gate                  switch  model: experts.shared_gate
moe-router-score-function               value   model: router.score_function
moe-router-pre-softmax                  switch  model: router.normalized
moe-router-topk-scaling-factor          value   model: router.scaling_factor
moe-router-num-groups                   value   model: router.num_groups
moe-router-group-topk                   value   model: router.groups_per_token
moe-router-enable-expert-bias           switch  model: router.correction_bias
moe-router-load-balancing-type          value   model: router.loss_per_sequence
moe-aux-loss-coeff                      value   model: router.loss_coefficient
overlap-moe-expert-parallel-comm        switch  plan: overlap.expert_parallel
moe-token-dispatcher-type               value   job: trainer.expert_dispatcher
moe-enable-deepep                       switch  job: trainer.expert_dispatcher
moe-flex-dispatcher-backend             value   job: trainer.expert_dispatcher
moe-shared-expert-overlap               switch  job: trainer.shared_expert_overlap
use-torch-fsdp2                         switch  none: torch's FSDP2 inside Megatron-LM
use-megatron-fsdp                       switch  none: Megatron-FSDP's own sharding
use-custom-fsdp                         switch  none: Megatron-FSDP's own sharding
tensor-parallel-num-weight-shards       value   none: weight shards beside tensor parallelism
hybrid-layer-pattern                    value   none: state-space layers between attention layers
hybrid-override-pattern                 value   none: state-space layers between attention layers
is-hybrid-model                         switch  none: state-space layers between attention layers
decoder-num-layers                      value   none: a model with an encoder
num-experts-per-layer                   value   none: experts that differ by layer
heterogeneous-layers-config-path        value   none: layers that differ (write a model file)
yaml-cfg                                value   none: arguments in a YAML file (write them as flags)
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
