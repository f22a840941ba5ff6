"""The manifest of a checkpoint."""

from hetplan.job.spec import Optimizer, Precision
from hetplan.model.numerics import Activation
from hetplan.model.spec import ModelSpec
from hetplan.runtime.checkpoint_contents import (
    CheckpointManifest,
    Llama3Scaling,
    Numerics,
    TrainedJob,
)

_NUMERICS = Numerics(
    norm_epsilon=1e-5,
    rotary_base=500000.0,
    activation=Activation.SILU,
    rotary_scaling=Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
    ),
)


def checkpoint_manifest(model: ModelSpec) -> CheckpointManifest:
    return CheckpointManifest(
        model=model,
        numerics=_NUMERICS,
        step=40,
        states=("weights", "exp_avg", "exp_avg_sq"),
        huggingface_config='{"model_type": "llama"}\n',
        trained=TrainedJob(
            optimizer=Optimizer.ADAMW,
            gradient_clipping=True,
            global_batch_size=64,
            sequence_length=2048,
            seed=7,
            precision=Precision.BFLOAT16,
            begun_from="/data/llama-native",
        ),
        hetplan_version="0.1.0",
    )
