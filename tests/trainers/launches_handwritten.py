"""Launches as people write them, from 8 to 1,024 accelerators."""

from __future__ import annotations

GPT3 = """\
#!/bin/bash

# 175B parameters on 1,024 accelerators
#SBATCH --nodes=128
#SBATCH --ntasks-per-node=1 --exclusive
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=${SLURM_NNODES:-128}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
DATA_PATH=$1 #<prefix>

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --node_rank ${SLURM_NODEID}
    --master_addr ${MASTER_ADDR}
    --master_port $MASTER_PORT
)

MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # or flash
    --vocab-size 50257
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    # --rampup-batch-size 16 16 5859375
    --lr 6.0e-5 --min-lr 6.0e-6
    --bf16
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    --tensor-model-parallel-size 8 \\
    --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 3 \\
    --use-distributed-optimizer \\
    --data-path $DATA_PATH --split 949,50,1
"""

LLAMA = """\
#!/bin/bash
# 8B on one machine; arguments in one string
TP=${TP:-2}
options=" \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 2 \\
    --sequence-parallel \\
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 \\
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope \\
    --swiglu --normalization RMSNorm --disable-bias-linear \\
    --untie-embeddings-and-output-weights --vocab-size 128256 \\
    --attention-dropout 0.0 --hidden-dropout 0.0 \\
    --micro-batch-size 1 --global-batch-size 128 --bf16 \\
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \\
    --recompute-granularity full --recompute-method block --recompute-num-layers 4 \\
    --pipeline-model-parallel-layout Et*15|t*17L \\
    --lr 1e-4 --train-iters 100"

python -m torch.distributed.run --standalone --nproc-per-node=8 pretrain_gpt.py ${options} "$@"
"""

MIXTRAL = """\
#!/usr/bin/env bash
set -euo pipefail
NNODES=${NNODES:?say how many nodes}
ARGS=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32)
ARGS+=(--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm)
ARGS+=(--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope)
ARGS+=(--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --vocab-size 32000)
ARGS+=(--seq-length 4096 --max-position-embeddings 32768 --micro-batch-size 1)
ARGS+=(--global-batch-size 256 --bf16 --use-distributed-optimizer)
ARGS+=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4)
export CUDA_DEVICE_MAX_CONNECTIONS=1
cd /opt/megatron && srun -N "$NNODES" --ntasks-per-node=8 --label \\
    python -u pretrain_gpt.py "${ARGS[@]}"
"""

EIGHT_NODES = (("NNODES", "8"), ("nnodes", "8"), ("nproc-per-node", "8"))
"""What the script above leaves to srun."""

ARGUMENTS = """\
--num-layers 24
--hidden-size 1024 --num-attention-heads 16
--seq-length 1024 --max-position-embeddings 1024
--micro-batch-size=4
--global-batch-size 64
--vocab-size 50257
--fp16
"""

HETERO = """\
system:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 3
  disable_bias_linear: True
  sequence_parallel: True
  use_distributed_optimizer: True
  hetero:
    enable_hetero: True
    # tp, cp, ep, dp, pp of each mesh
    hetero_process_meshes: [2, 1, 1, 4, 1, 4, 1, 1, 2, 2]
    hetero_device_types: ["A100", "H100"]
    hetero_pipeline_layer_split: [4, 14, 14]
  recompute:
    recompute_granularity: full
    recompute_method: uniform
    recompute_num_layers: 1
    recompute_granularity_per_stage_micro_batch:
      - [1, 16, 1]
      - [2, 16, 0]
  precision:
    bf16: True
model:
  num_layers: 32
  hidden_size: 4096
  num_attention_heads: 32
  num_query_groups: 8
  ffn_hidden_size: 11008
  seq_length: 4096
  max_position_embeddings: 4096
  use_rotary_position_embeddings: true
  swiglu: true
  normalization: RMSNorm
  untie_embeddings_and_output_weights: true
  attention_dropout: 0.0
  hidden_dropout: 0.0
  micro_batch_size: 1
  global_batch_size: 64
data:
  tokenizer:
    vocab_size: 32000
    make_vocab_size_divisible_by: 64
"""

EXPERIMENT = """\
defaults:
  - train: hetero
  - _self_

experiment:
  exp_name: two_kinds
  exp_dir: ./outputs
  seed: 42
  task: {type: train, backend: megatron, entrypoint: ./flagscale/train/train_gpt.py}
  runner:
    hostfile: hosts
    rdzv_backend: static
  envs:
    CUDA_DEVICE_MAX_CONNECTIONS: 1
action: run
hydra:
  run:
    dir: ${experiment.exp_dir}/hydra
"""

HOSTS = """\
# the second kind first: FlagScale sorts by type
h100-0 slots=8 type=H100
h100-1 slots=8 type=H100
a100-0 slots=8 type=A100
"""

TITAN = """\
#!/usr/bin/bash
set -ex
NGPU=${NGPU:-"8"}
PYTORCH_ALLOC_CONF="expandable_segments:True" \\
torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --rdzv_endpoint="localhost:0" \\
--local-ranks-filter 0 --role rank --tee 3 \\
-m torchtitan.train --module llama3 --config llama3_8b \\
--parallelism.tensor_parallel_degree 2 --parallelism.pipeline_parallel_degree 2 \\
--training.local_batch_size 8 --training.seq_len 4096 activation_checkpoint:full
"""

TOML = """\
[job]
dump_folder = "./outputs"

[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 4
global_batch_size = 32
seq_len = 8192
steps = 1000

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1  # the rest
tensor_parallel_degree = 4
fsdp_reshard_after_forward = "never"

[activation_checkpoint]
mode = "full"  # or none
"""
