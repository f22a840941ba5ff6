#!/bin/bash
# Llama 2 7B on 32 accelerators of two kinds, as it was before anybody planned it.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${NNODES:-4}
TP=${TP:-4}
PP=${PP:-4}

DISTRIBUTED_ARGS=(
    --nproc-per-node $GPUS_PER_NODE
    --nnodes $NNODES
    --node-rank ${NODE_RANK}
    --rdzv-backend static
    --master-addr ${MASTER_ADDR}
    --master-port ${MASTER_PORT:-29500}
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008
    --num-attention-heads 32 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000
    --attention-dropout 0.0 --hidden-dropout 0.0
)
if [ -n "${WANDB_PROJECT}" ]; then
    LOG_ARGS=(--wandb-project "$WANDB_PROJECT")
fi
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${LOG_ARGS[@]}" \
    --tensor-model-parallel-size $TP --sequence-parallel \
    --pipeline-model-parallel-size $PP \
    --use-distributed-optimizer --overlap-grad-reduce \
    --micro-batch-size 1 --global-batch-size 1024 --bf16 \
    --lr 3e-4 --train-iters 5000 --data-path ${DATA_PATH}
