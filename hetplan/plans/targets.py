"""What each trainer can run, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetplan.errors import InputError
from hetplan.job.spec import Optimizer
from hetplan.plans.plan import SCHEDULES, OverlapSettings, RecomputeModule, Sharding

_EVERY_OVERLAP = OverlapSettings(
    reduction=True,
    gathering=True,
    tensor_parallel=True,
    context_parallel=True,
    send=True,
    expert_parallel=True,
)
MAX_VIRTUAL_STAGES = 8
"""More than published runs: 3 in arXiv 2205.05198 (table 3), 6 in arXiv 2402.15627."""
MAX_EXTRA_DEPTH = 8
"""Hides 8 stage times of latency; a round trip between continents is 0.3 s, a stage time 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Capabilities of one trainer."""

    name: str
    context_parallel: bool = False
    expert_parallel: bool = False
    sequence_parallel: bool = False
    experts_need_sequence_parallel: bool = False
    """Experts with tp above 1 run with sequence parallelism only."""
    several_pipelines: bool = False
    """More than one pipeline, each with its own devices, layers per stage and microbatches."""
    local_steps: bool = False
    """Sites may update by themselves and be averaged every few steps (`Plan.outer`)."""
    other_warmup: bool = False
    """Warm-up depths other than the schedule's own."""
    fewer_microbatches_than_stages: bool = False
    """1F1B runs with fewer microbatches than the pipeline has stages."""
    context_shards: bool = False
    """Context-parallel ranks always share the optimizer state."""
    tied_stages: bool = True
    """A matrix that embedding and head share may lie on the first and the last of several stages;
    otherwise a model that ties them is trained in one stage."""
    copied_heads: bool = True
    """Where tp exceeds the key-value heads, several ranks hold the same head."""
    rendezvous_sends: bool
    """A send between stages holds the sender until the receiver has posted."""
    vocab_multiple: int
    """The vocabulary is padded to a multiple of this times tp."""
    optimizer_sharding: bool
    """Layouts split the optimizer state over the data-parallel ranks unless they say otherwise;
    `sharding` has what is possible."""
    full_recompute: bool
    own_layers_only: bool = False
    """It has hetplan's own gpt and llama layers and no others, whose partial gradients it sums in
    every backward pass (`hetplan.cost.step_model.layer_calls`)."""
    other_padding: bool = False
    """A plan may pad the vocabulary further than `vocab_multiple` asks."""
    stages_differ: bool
    """Stages may differ in their degrees and microbatch size."""
    mixed_stages: bool = False
    """The replica entries of a stage may be of unlike device kinds, degrees and microbatch sizes;
    otherwise they are of one kind and differ in dp at most."""
    equal_ends: bool = False
    """With a tied matrix or multi-token prediction the first and the last stage have one tp, and dp
    of the first divides dp of the last."""
    schedules: tuple[str, ...]
    splits_compiled_layers: bool = True
    """Compiled layers can run the gradients of inputs and of weights one by one."""
    whole_microbatch_groups: bool
    """Interleaving needs as many microbatches as stages, or a multiple of that."""
    least_interleaved_stages: int = 2
    """Fewest stages of an interleaved pipeline."""
    most_virtual_stages: int = 1
    """Most virtual stages that are searched; a plan, or a pin, may have more."""
    most_extra_depth: int = 0
    """Most microbatches that are searched beyond the schedule's own depth, with early sends."""
    whole_nodes: bool
    """A stage lies in one node or fills whole ones; within limits on power or cores what the plan
    uses of several, equally much of each."""
    island_runs: bool
    """The stages of an island stand next to each other in the pipeline."""
    sharding: tuple[Sharding, ...]
    whole_in_stages: bool = False
    """Pipelines of several stages keep gradients and parameters whole."""
    shards_adam_only: bool = False
    """Of other optimizers than Adam the state is never split."""
    recompute_modules: tuple[RecomputeModule, ...]
    """What selective recomputation can name; empty: there is none."""
    recompute_layers: bool
    """Full recomputation of only some layers of a stage."""
    recompute_per_stage: bool
    """Stages may recompute differently."""
    optimizer_offload: bool
    offload_shares: bool = False
    """Copies of weights share the optimizer that is in host memory."""
    overlap: OverlapSettings
    """What it can run beside compute."""
    overlap_needs: bool
    """Gathering is overlapped only with reduction, tensor parallelism only with sequence
    parallelism, sends only with virtual stages."""
    clips_gradients: bool
    """It clips gradients by their global norm unless told otherwise."""
    gradient_buffer: bool = False
    """Gradients lie in one buffer, which every step zeroes, divides by the number of copies and
    looks through for overflow (`hetplan.cost.step_model.end_of_step.gradient_passes`)."""
    batched_interleaving: bool = False
    """Interleaved stages post a send and a receive of equal passes together, as Megatron-LM does
    (`hetplan.cost.replay.programs`); otherwise as torch's schedules."""
    separate_loss_sums: bool = False
    """The sums of the vocabulary-parallel loss are three messages: maximum, target's logit, sum
    (megatron/core/tensor_parallel/cross_entropy.py); otherwise the last two are one."""
    other_formats: bool
    """A boundary may have another number format than the plan, and a sum of gradients another than
    the trainer's own."""

    @property
    def interleaving(self) -> bool:
        """Whether a stage may have several chunks of layers."""
        return "interleaved-1f1b" in self.schedules

    def shardings(self, optimizer: str) -> tuple[Sharding, ...]:
        """What of `sharding` a plan with this update rule may have."""
        if self.shards_adam_only and optimizer != Optimizer.ADAMW:
            return (Sharding.NONE,)
        return self.sharding

    def padded_vocab_size(self, vocab_size: int, tp: int) -> int:
        """Vocabulary that is trained under this tp: rounded up to `vocab_multiple` times tp."""
        multiple = self.vocab_multiple * tp
        return -(-vocab_size // multiple) * multiple


_MEGATRON = Target(
    context_parallel=True,
    expert_parallel=True,
    sequence_parallel=True,
    # core/transformer/moe/moe_layer.py raises while training.
    experts_need_sequence_parallel=True,
    fewer_microbatches_than_stages=True,
    name="megatron",
    # What stock Megatron-LM can express: one tp, dp and microbatch size for all stages, uneven
    # layers per stage.
    # Non-interleaved 1F1B waits for batched isend/irecv (p2p overlap is forced off).
    rendezvous_sends=True,
    # --make-vocab-size-divisible-by defaults to 128.
    vocab_multiple=128,
    optimizer_sharding=True,
    full_recompute=True,
    # parallel_state.py has one RankGenerator: one tp, cp, ep and dp for all stages.
    stages_differ=False,
    schedules=("1f1b", "interleaved-1f1b"),
    # core/pipeline_parallel/schedules.py refuses a last group smaller than the stages.
    whole_microbatch_groups=True,
    # training/arguments.py: more than 2 stages unless sends are overlapped.
    least_interleaved_stages=3,
    most_virtual_stages=MAX_VIRTUAL_STAGES,
    whole_nodes=True,
    island_runs=True,
    # Megatron-FSDP, which shards more, needs another environment than tensor parallelism.
    sharding=(Sharding.NONE, Sharding.OPTIMIZER),
    # core/optimizer/distrib_optimizer.py takes apex's and torch's Adam and no other.
    shards_adam_only=True,
    recompute_modules=tuple(RecomputeModule),
    # --recompute-method block with --recompute-num-layers, one number for all stages.
    recompute_layers=True,
    recompute_per_stage=False,
    # --optimizer-cpu-offload with --optimizer-offload-fraction, of the distributed optimizer alone.
    optimizer_offload=True,
    offload_shares=True,
    overlap=_EVERY_OVERLAP,
    # training/arguments.py: --overlap-param-gather, --tp-comm-overlap; overlap of sends is
    # forced off without interleaving.
    overlap_needs=True,
    # --clip-grad defaults to 1.0.
    clips_gradients=True,
    # megatron/core/distributed/param_and_grad_buffer.py.
    gradient_buffer=True,
    batched_interleaving=True,
    separate_loss_sums=True,
    other_formats=False,
)

TARGETS: dict[str, Target] = {
    "native": Target(
        # hetplan.profiling.layers: experts are cut like the other weights.
        expert_parallel=True,
        # torch.distributed.pipelining's Schedule1F1B, whose order it is, refuses fewer microbatches
        # than stages.
        several_pipelines=True,
        local_steps=True,
        other_warmup=True,
        name="native",
        # hetplan's reference trainer (hetplan launch).
        # gloo sends are rendezvous; hetplan.runtime.passes runs hetplan.cost.replay.programs, whose
        # order is that of torch's Schedule1F1B, which waits for each fused send and receive.
        rendezvous_sends=True,
        vocab_multiple=1,
        optimizer_sharding=False,
        full_recompute=True,
        own_layers_only=True,
        # What the reference trainer is made for; what of it `hetplan launch` does not run yet
        # is in hetplan.plans.ranks.
        stages_differ=True,
        mixed_stages=True,
        schedules=("1f1b", "interleaved-1f1b"),
        # torch's ScheduleInterleaved1F1B makes other groups where stages do not divide
        # microbatches; the replay has none.
        whole_microbatch_groups=True,
        most_virtual_stages=MAX_VIRTUAL_STAGES,
        most_extra_depth=MAX_EXTRA_DEPTH,
        whole_nodes=False,
        island_runs=False,
        sharding=(Sharding.NONE, Sharding.OPTIMIZER),
        recompute_modules=(),
        recompute_layers=False,
        recompute_per_stage=True,
        optimizer_offload=False,
        # Sends may leave before they are waited for; nothing else runs beside compute
        # (hetplan.runtime.trainer reduces after the pipeline).
        overlap=OverlapSettings(context_parallel=False, send=True),
        overlap_needs=False,
        # hetplan.runtime.gradients clips where the job asks for it.
        clips_gradients=False,
        other_formats=False,
    ),
    "megatron": _MEGATRON,
    # A patched Megatron-LM: what is not named here is as there.
    "flagscale": replace(
        _MEGATRON,
        # hetero/parallel_context.py asserts cp == 1; ep of meshes is not guaranteed to work.
        context_parallel=False,
        expert_parallel=False,
        name="flagscale",
        # FlagScale's Megatron-LM with --enable-hetero: every mesh (stages of one device kind next
        # to each other) has its own tp, dp and microbatch size.
        # --hetero-process-meshes: tp, cp, ep, dp, pp of every mesh (flagscale/train/arguments.py).
        stages_differ=True,
        equal_ends=True,
        # pre_validate_args refuses virtual stages.
        schedules=("1f1b",),
        least_interleaved_stages=2,
        most_virtual_stages=1,
        batched_interleaving=False,
        # --recompute-granularity-per-stage-micro-batch turns full recomputation on or off.
        recompute_modules=(),
        recompute_per_stage=True,
        optimizer_offload=False,
        overlap=OverlapSettings(reduction=True, gathering=True, tensor_parallel=True),
    ),
    "torchtitan": Target(
        context_parallel=True,
        expert_parallel=True,
        sequence_parallel=True,
        context_shards=True,
        # models/common/decoder.py: `Weight tying is not supported with Pipeline Parallel.`
        tied_stages=False,
        # The view of a part of a head fails (pytorch/torchtitan#2574, #2577).
        copied_heads=False,
        name="torchtitan",
        # torchtitan: one tp, cp, dp and microbatch size for all stages, uneven layers per stage
        # (parallelism.module_fqns_per_model_part), FSDP2 over dp x cp.
        # torch.distributed.pipelining waits for each fused send and receive.
        rendezvous_sends=True,
        # DTensor shards the embedding unevenly where tp does not divide it.
        vocab_multiple=1,
        optimizer_sharding=True,
        full_recompute=True,
        # distributed/parallel_dims.py: one mesh for all stages.
        stages_differ=False,
        # parallelism.pipeline_parallel_schedule, one of torch's; GPipe is never better than 1F1B.
        schedules=("1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipev"),
        # _check_torch_compile_compatibility of torch.distributed.pipelining.schedules (torch 2.13).
        splits_compiled_layers=False,
        # torch makes other groups where stages do not divide microbatches; the replay has none.
        whole_microbatch_groups=True,
        most_virtual_stages=MAX_VIRTUAL_STAGES,
        whole_nodes=True,
        island_runs=True,
        # With pipelines FSDP2 gathers parameters once a step and reduces gradients after the last
        # microbatch: the optimizer is sharded. fsdp_reshard_after_forward always frees parameters
        # after forward passes alone then, as stages keep them, and gradients, whole in backward
        # passes (torch/distributed/pipelining/stage.py): more traffic for next to no memory.
        # Unsharded: data_parallel_replicate_degree; cp is always a part of the sharded mesh.
        sharding=(Sharding.NONE, Sharding.OPTIMIZER, Sharding.PARAMETERS),
        whole_in_stages=True,
        # activation_checkpoint.mode selective saves chosen operations, not all but attention.
        recompute_modules=(),
        recompute_layers=False,
        recompute_per_stage=False,
        optimizer_offload=False,
        overlap=OverlapSettings(reduction=True, gathering=True),
        overlap_needs=False,
        # training.max_norm defaults to 1.0.
        clips_gradients=True,
        # loss_parallel: maximum, sum and target's logit are reduced one by one.
        separate_loss_sums=True,
        other_formats=False,
    ),
    "any": Target(
        context_parallel=True,
        expert_parallel=True,
        sequence_parallel=True,
        several_pipelines=True,
        local_steps=True,
        other_warmup=True,
        fewer_microbatches_than_stages=True,
        name="any",
        # No trainer in particular: whatever can be priced, to ask what a trainer would gain; no
        # plan of it can be launched.
        rendezvous_sends=True,
        vocab_multiple=1,
        other_padding=True,
        optimizer_sharding=True,
        full_recompute=True,
        stages_differ=True,
        mixed_stages=True,
        schedules=SCHEDULES,
        whole_microbatch_groups=False,
        least_interleaved_stages=1,
        most_virtual_stages=MAX_VIRTUAL_STAGES,
        most_extra_depth=MAX_EXTRA_DEPTH,
        whole_nodes=False,
        island_runs=False,
        sharding=tuple(Sharding),
        recompute_modules=tuple(RecomputeModule),
        recompute_layers=True,
        recompute_per_stage=True,
        optimizer_offload=True,
        overlap=_EVERY_OVERLAP,
        overlap_needs=False,
        clips_gradients=True,
        # What a trainer runs, `any` runs as megatron (hetplan.job.trainer).
        batched_interleaving=True,
        separate_loss_sums=True,
        other_formats=True,
    ),
}


def target(name: str) -> Target:
    """The target of this name; an InputError that lists the known ones otherwise."""
    if name not in TARGETS:
        raise InputError(f"unknown target {name!r}; known targets: {', '.join(sorted(TARGETS))}")
    return TARGETS[name]
