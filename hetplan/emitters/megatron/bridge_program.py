"""The text of the program that gives a plan's settings to Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.job.spec import Precision

_HEAD = '''"""Pre-training under a plan of hetplan, with Megatron-Bridge.

Every setting stands below as a literal, under the name of the dataclass that takes it.
"""

import os

import torch
import torch.nn.functional as functions
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    GPTDatasetConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.pretrain import pretrain
from megatron.core.transformer.enums import AttnBackend

'''
_TAIL = '''

def configuration() -> ConfigContainer:
    """The settings above as Megatron-Bridge's configuration."""
    model = dict(MODEL)
    if "attention_backend" in model:
        model["attention_backend"] = AttnBackend[model["attention_backend"]]
    model["activation_func"] = functions.silu if model.get("gated_linear_unit") else functions.gelu
    provider = MLAModelProvider if model.get("multi_latent_attention") else GPTModelProvider
    data = dict(
        DATASET,
        random_seed=RNG.get("seed", 1234),
        reset_attention_mask=False,
        reset_position_ids=False,
        eod_mask_loss=False,
        dataloader_type="single",
    )
    if "blend" in data:
        data["blend"] = (list(data["blend"]), None)
        dataset = GPTDatasetConfig(**data)
    else:
        dataset = MockGPTDatasetConfig(data.pop("sequence_length"), **data)
    dist = dict(DIST)
    if TRANSPORT_FILE:
        folder = os.path.dirname(os.path.abspath(__file__))
        dist["nccl_communicator_config_path"] = os.path.join(folder, TRANSPORT_FILE)
    return ConfigContainer(
        model=provider(pipeline_dtype=PARAMETERS, params_dtype=PARAMETERS, **model),
        train=TrainingConfig(**TRAIN),
        optimizer=OptimizerConfig(params_dtype=PARAMETERS, **OPTIMIZER),
        scheduler=SchedulerConfig(**SCHEDULER),
        ddp=DistributedDataParallelConfig(
            grad_reduce_in_fp32=PRECISION["grad_reduce_in_fp32"], **DDP
        ),
        dist=DistributedInitConfig(**dist),
        dataset=dataset,
        tokenizer=TokenizerConfig(**TOKENIZER),
        logger=LoggerConfig(**LOGGER),
        checkpoint=CheckpointConfig(**CHECKPOINT),
        rng=RNGConfig(**RNG),
        mixed_precision=MixedPrecisionConfig(
            params_dtype=PARAMETERS, pipeline_dtype=PARAMETERS, **PRECISION
        ),
    )


if __name__ == "__main__":
    pretrain(config=configuration(), forward_step_func=forward_step)
'''


def program_text(
    settings: tuple[tuple[str, tuple[tuple[str, object], ...]], ...],
    *,
    precision: Precision,
    transport: str,
) -> str:
    """The program; `transport`: name of the file of the groups' networks beside it, or empty."""
    return _HEAD + "\n".join(_lines(settings, precision, transport)) + "\n" + _TAIL


def _lines(
    settings: tuple[tuple[str, tuple[tuple[str, object], ...]], ...],
    precision: Precision,
    transport: str,
) -> Iterator[str]:
    yield f"PARAMETERS = torch.{precision.value}"
    yield f"TRANSPORT_FILE = {transport!r}"
    for name, fields in settings:
        yield f"{name.upper()} = {{"
        yield from (f"    {field!r}: {value!r}," for field, value in fields)
        yield "}"
