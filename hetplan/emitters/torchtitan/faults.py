"""What in a legal plan for target torchtitan can torchtitan 0.3.0 not be told?"""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.emitters.sheet import LaunchSheet
from hetplan.emitters.torchtitan.arguments import MOCK_VOCABULARY, degrees_of
from hetplan.emitters.torchtitan.modules import model_faults
from hetplan.emitters.trainer_launch import EmitOptions
from hetplan.emitters.vendors import mixed_library_faults, vendor_of
from hetplan.errors import Fault
from hetplan.job.spec import Optimizer, Precision, ProductFormat
from hetplan.job.trainer import trainer_settings
from hetplan.model.layers import Attention, Mlp
from hetplan.plans.pieces import stage_copies
from hetplan.plans.plan import Sharding
from hetplan.search.result import SearchResult

_FLEX_BLOCK = 128
"""torch.nn.attention.flex_attention._DEFAULT_SPARSE_BLOCK_SIZE."""
_NVFP4_BLOCK = 128
"""torchtitan/components/quantization/nvfp4.py: every dimension of a product, on every rank."""


def torchtitan_faults(
    result: SearchResult, sheet: LaunchSheet, options: EmitOptions
) -> tuple[Fault, ...]:
    """Everything that keeps the plan from torchtitan."""
    return (
        *_model(result),
        *_settings(result),
        *_degrees(result),
        *_devices(sheet),
        *_options(result, options),
    )


def _model(result: SearchResult) -> Iterator[Fault]:
    model = result.inputs.model
    for message in model_faults(model):
        yield Fault(
            field="inputs.model",
            message=f"{model.name} has {message}; what is emitted is torchtitan's Llama 3 model, "
            "which has not: use target megatron",
        )
    stages = len(result.plan.pipelines[0].stages)
    if model.tied_embeddings and stages > 1:
        # models/common/decoder.py, update_from_config.
        yield Fault(
            field="plan.pipelines[0].stages",
            message=f"{stages} stages and tied embeddings, which torchtitan refuses together (the "
            "two copies are one parameter): pin pp: 1, or use target megatron",
        )


def _settings(result: SearchResult) -> Iterator[Fault]:
    job, plan = result.inputs.job, result.plan
    if job.precision is Precision.FLOAT16:
        yield Fault(
            field="inputs.job.precision",
            message="float16; torchtitan has no loss scaling (training.mixed_precision_param is "
            "bfloat16 or float32): use bfloat16",
        )
    if job.optimizer is not Optimizer.ADAMW:
        # components/optimizer/optimizer.py, _resolve_optimizer_factory.
        yield Fault(
            field="inputs.job.optimizer",
            message=f"{job.optimizer}; torchtitan has Adam, AdamW and DistMuon: use adamw",
        )
    if job.sequence_lengths and not job.packing:
        yield Fault(
            field="inputs.job.packing",
            message="false; torchtitan always packs short texts into whole sequences: set "
            "packing: true",
        )
    if trainer_settings(job).product_format is ProductFormat.NVFP4:
        yield from _nvfp4(result, degrees_of(plan).tp)


def _nvfp4(result: SearchResult, tp: int) -> Iterator[Fault]:
    model = result.inputs.model
    layer = model.layer_runs[0].layer
    if not isinstance(layer.attention, Attention) or not isinstance(layer.mlp, Mlp):
        return
    query, kv = layer.attention.slice_sizes(tp)
    sizes = (
        ("hidden_size", model.hidden_size),
        ("queries of a rank", query),
        ("queries, keys and values of a rank", query + 2 * kv),
        ("ffn_hidden_size of a rank", layer.mlp.ffn_hidden_size // tp),
    )
    for name, size in sizes:
        if size % _NVFP4_BLOCK:
            yield Fault(
                field="inputs.job.trainer.product_format",
                message=f"nvfp4, and {name} is {size} at tp {tp}; torchtitan's products in it are "
                f"multiples of {_NVFP4_BLOCK}: leave product_format out, or pin a smaller tp",
            )


def _degrees(result: SearchResult) -> Iterator[Fault]:
    plan, job = result.plan, result.inputs.job
    degrees = degrees_of(plan)
    copies = stage_copies(plan.pipelines[0].stages[0])
    if degrees.shard * degrees.cp * degrees.replicate != copies or (
        plan.sharding is Sharding.OPTIMIZER and plan.optimizer_shards != degrees.shard * degrees.cp
    ):
        yield Fault(
            field="plan.optimizer_shards",
            message=f"{plan.optimizer_shards} of {copies} copies with cp {degrees.cp}; torchtitan "
            "shards over data_parallel_shard_degree times cp ranks, which divide the copies: shard "
            "over all of them",
        )
    block = _FLEX_BLOCK * degrees.cp
    if degrees.cp > 1 and job.sequence_length % block:
        # torch/distributed/tensor/experimental/_context_parallel: create_cp_block_mask.
        yield Fault(
            field="inputs.job.sequence_length",
            message=f"{job.sequence_length} is no multiple of {block}, {_FLEX_BLOCK} times cp "
            f"{degrees.cp}, in which FlexAttention is cut: use such a length, or pin cp: 1",
        )


def _devices(sheet: LaunchSheet) -> Iterator[Fault]:
    yield from mixed_library_faults(sheet, "torchtitan")
    for host in sheet.hosts:
        if vendor_of(host.vendor, host.device_kind).backend == "gloo":
            yield Fault(
                field="plan.pipelines[0].stages",
                message=f"devices of kind {host.device_kind}, which is no accelerator; torchtitan "
                "trains on accelerators: use target native",
            )
            return


def _options(result: SearchResult, options: EmitOptions) -> Iterator[Fault]:
    if len(options.data) > 1:
        yield Fault(
            field="--data",
            message=f"{len(options.data)} data sets; torchtitan's text loader reads one folder: "
            "give one, or change dataloader in hetplan_torchtitan.py",
        )
    if options.data and options.learning_rate is None:
        yield Fault(
            field="--learning-rate", message="is not given; with --data say the learning rate"
        )
    if options.data and not options.tokenizer:
        yield Fault(
            field="--tokenizer",
            message="is not given; torchtitan reads texts: say the folder of a Hugging Face "
            "tokenizer",
        )
    size = result.plan.padded_vocab_size
    if not options.data and not options.tokenizer and size < MOCK_VOCABULARY:
        yield Fault(
            field="inputs.model.vocab_size",
            message=f"{size} with padding; torchtitan's test texts need {MOCK_VOCABULARY} entries: "
            "say --data and --tokenizer",
        )
