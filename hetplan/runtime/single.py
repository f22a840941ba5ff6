"""Reference losses: the same model trained in one process, without any of the trainer.

Plain torch: whole layers, torch's own cross entropy, one gradient per parameter. It shares with
the trainer the layers, the data and the update rule's constants, and nothing that splits work.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hetplan.cost.step_model.end_of_step import clips_gradients
from hetplan.errors import InputError
from hetplan.job.spec import Job, Precision
from hetplan.model.spec import ModelSpec
from hetplan.profiling.layers import Embedding, Head, build_layer
from hetplan.profiling.weights import Cut, make_rule
from hetplan.runtime import gradients
from hetplan.runtime.data import MarkovTokens, sample_numbers


def reference_losses(
    model: ModelSpec, job: Job, *, steps: int, microbatch_size: int
) -> tuple[float, ...]:
    """Mean loss over the global batch at each step, before its update, in float32 on the CPU.

    `microbatch_size` sets how many samples are computed at a time; the losses do not depend on it.
    """
    if job.precision is not Precision.FLOAT32:
        raise InputError(
            f"precision is {job.precision}; losses can be compared in float32 only, where every "
            "plan rounds alike"
        )
    layers = _layers(model, job)
    rule = make_rule(job.optimizer, layers.parameters())
    data = MarkovTokens.of(model.vocab_size, job.seed)
    losses = []
    for step in range(steps):
        numbers = sample_numbers(
            step, global_batch_size=job.global_batch_size, microbatch_size=1, dp=1, dp_index=0
        )
        drawn = torch.from_numpy(data.samples(numbers, job.sequence_length + 1))
        total = 0.0
        for samples in torch.split(drawn, microbatch_size):
            loss = _loss(layers, samples) * (len(samples) / len(drawn))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        if clips_gradients(job):
            nn.utils.clip_grad_norm_(layers.parameters(), gradients.MAX_NORM)
        rule.step()
        rule.zero_grad()
        losses.append(total)
    return tuple(losses)


def _layers(model: ModelSpec, job: Job) -> nn.ModuleList:
    layers = nn.ModuleList(
        build_layer(
            model,
            position,
            cut=Cut(),
            group=None,
            seed=job.seed,
            dtype=torch.float32,
            device="cpu",
        )
        for position in range(len(model.layers))
    )
    first, last = layers[0], layers[-1]
    if model.tied_embeddings and isinstance(first, Embedding) and isinstance(last, Head):
        last.weight = first.weight
    return layers


def _loss(layers: nn.ModuleList, samples: torch.Tensor) -> torch.Tensor:
    x = samples[:, :-1]
    for layer in layers:
        x = layer(x)
    return functional.cross_entropy(x.flatten(0, 1), samples[:, 1:].flatten())
