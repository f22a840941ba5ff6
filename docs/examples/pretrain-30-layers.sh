#!/bin/bash
# Two hosts of 8 devices, and more slips than one script should have.
torchrun --nnodes 2 --nproc-per-node 8 --node-rank "$NODE_RANK" --rdzv-backend c10d \
    --rdzv-endpoint host0:29500 pretrain_gpt.py \
    --tensor-model-parallel-size 4 \
    --pipeline-model-parallel-size 4 \
    --num-layers 30 \
    --hidden-size 4096 \
    --num-attention-heads 32 \
    --seq-length 4096 \
    --micro-batch-size 2 \
    --global-batch-size 127 \
    --overlap-param-gather \
    --use-distributed-optimizer \
    --recompute-granularity selective --recompute-num-layers 1
