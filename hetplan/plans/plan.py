"""What runs where: the plan, in words that no trainer owns.

Layers are positions in `ModelSpec.layers` (0 is the embedding, the last one the head). Devices are
the cluster's device numbers, written as ranges with strides, so that a plan for 100,000 devices
stays small.

Older plan files lack fields, which `Plan.from_older_form` adds to the raw data. Forms 1 and 2 had
no `sharding`: they sharded the optimizer state or nothing. Forms before `hetplan.plan/8` did not
name the number format of a reduction: it is the format of the job's trainer
(`hetplan.job.trainer`). Forms before `hetplan.plan/12` had no V schedules, and
`zb-h1` with one chunk only. Data of a wrong type is left as it is, for the reader to refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from hetplan.errors import InputError
from hetplan.job.spec import Precision, RecomputeModule, Sharding, Synchronisation, TrainerOptions
from hetplan.job.trainer import trainer_settings_of
from hetplan.plans.v_schedules import V_SCHEDULES, stage_of

__all__ = [
    "FULL_RECOMPUTE",
    "NO_RECOMPUTE",
    "SCHEDULES",
    "Boundary",
    "DeviceRange",
    "LayerRange",
    "OuterSynchronisation",
    "OverlapSettings",
    "Pipeline",
    "Plan",
    "Recompute",
    "RecomputeGranularity",
    "RecomputeModule",
    "ReductionGroup",
    "Replica",
    "Schedule",
    "Sharding",
    "Stage",
    "compress",
    "expand",
    "searched_with_formats",
    "with_formats",
    "with_sharding",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRange:
    """`count` device numbers from `start`, `stride` apart."""

    start: int
    count: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 1 or self.stride < 1:
            raise InputError(
                f"start {self.start}, count {self.count}, stride {self.stride}; device numbers "
                "begin at 0, and count and stride at 1"
            )

    @property
    def last(self) -> int:
        """The largest device number."""
        return self.start + (self.count - 1) * self.stride

    def devices(self) -> range:
        """The device numbers in order."""
        return range(self.start, self.start + self.count * self.stride, self.stride)


def compress(devices: Sequence[int]) -> tuple[DeviceRange, ...]:
    """The fewest ranges, found greedily, that list these device numbers in this order."""
    ranges: list[DeviceRange] = []
    at = 0
    while at < len(devices):
        stop, stride = at + 1, 1
        if stop < len(devices):
            stride = devices[stop] - devices[at]
            while stop < len(devices) and devices[stop] - devices[stop - 1] == stride:
                stop += 1
        if stride < 1:
            stop, stride = at + 1, 1
        ranges.append(DeviceRange(start=devices[at], count=stop - at, stride=stride))
        at = stop
    return tuple(ranges)


def expand(ranges: Iterable[DeviceRange]) -> tuple[int, ...]:
    """Every device number of these ranges, in order."""
    return tuple(chain.from_iterable(part.devices() for part in ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """Layers `start` up to but not including `stop`."""

    start: int
    stop: int


class RecomputeGranularity(StrEnum):
    """What a stage computes a second time in its backward pass instead of keeping it."""

    NONE = "none"
    SELECTIVE = "selective"
    """Only `Recompute.modules` of every transformer layer."""
    FULL = "full"
    """Whole transformer layers, of which only the input is kept."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Recompute:
    """Recomputation of one stage."""

    granularity: RecomputeGranularity = RecomputeGranularity.NONE
    modules: tuple[RecomputeModule, ...] = ()
    """What selective recomputation runs again; empty otherwise."""
    layers: int | None = None
    """Transformer layers of each chunk that recompute, its first ones; None: all."""

    @property
    def words(self) -> str:
        """`none`, `full` or the modules, as in `core_attn+mlp`."""
        return "+".join(self.modules) or self.granularity.value


NO_RECOMPUTE = Recompute()
FULL_RECOMPUTE = Recompute(granularity=RecomputeGranularity.FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSettings:
    """Communication that the trainer runs beside compute."""

    reduction: bool = False
    """Gradient reduction beside the last microbatch's backward pass."""
    gathering: bool = False
    """Gathering of updated parameters beside the first microbatch's forward pass."""
    tensor_parallel: bool = False
    """Tensor-parallel collectives beside the matrix products next to them."""
    context_parallel: bool = True
    """Key-value transfers of ring attention beside the attention of the block before."""
    send: bool = False
    """Sends between stages beside the passes of other microbatches, with rendezvous transports."""
    expert_parallel: bool = False
    """Tokens to their experts and back in one microbatch's forward pass beside the backward compute
    of another one, and the other way round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Devices of a stage that share degrees: dp * cp * tp of them, tp fastest, then cp, then dp."""

    devices: tuple[DeviceRange, ...]
    tp: int
    cp: int = 1
    ep: int = 1
    """Ranks among which the routed experts of a layer are dealt out; these and `etp` divide the
    replica's devices anew: etp fastest, then ep, then copies (Megatron-core's expert groups)."""
    etp: int = 1
    """Tensor-parallel degree inside an expert; 1 where the model has none."""
    microbatch_size: int
    """Sequences of one microbatch on one data-parallel rank."""
    sequence_parallel: bool = False

    @property
    def num_devices(self) -> int:
        """Devices of all ranges."""
        return sum(part.count for part in self.devices)

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.num_devices // (self.tp * self.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Contiguous layers and the devices that run them."""

    chunks: tuple[LayerRange, ...]
    """One layer range per virtual stage."""
    replicas: tuple[Replica, ...]
    recompute: Recompute = Recompute()
    warmup_depth: int
    """Most microbatches in flight: forward done, backward not yet; each chunk's counted by itself
    (`hetplan.plans.pieces`)."""

    @property
    def devices(self) -> tuple[DeviceRange, ...]:
        """Devices of all replicas, in their order."""
        return tuple(chain.from_iterable(replica.devices for replica in self.replicas))

    @property
    def num_layers(self) -> int:
        """Layers of all chunks, embedding and head counted."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", *V_SCHEDULES)
"""Orders of a stage's passes that can be priced (`hetplan.cost.schedules`)."""
SPLIT_SCHEDULES = ("zb-h1", *V_SCHEDULES)
"""Those that delay the gradients of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Order of forward and backward passes."""

    name: str
    """One of `SCHEDULES`."""
    virtual_stages: int = 1
    """Layer ranges per stage; 2 for V schedules, otherwise above 1 only for `interleaved-1f1b` and
    `zb-h1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What crosses from stage `index` to the next one, and its gradient back."""

    index: int
    transport: str
    """A `hetplan.cluster.spec.Transport` value."""
    precision: str
    """Number format on the wire, a `hetplan.job.spec.Precision` value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A whole copy of the model over its own devices."""

    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]
    """One per pair of neighbouring stages, in order."""
    num_microbatches: int
    schedule: Schedule

    @property
    def ends(self) -> tuple[Stage, ...]:
        """The stages with the embedding and with the head; one where it has both."""
        count = len(self.stages)
        last = stage_of(self.schedule.name, self.schedule.virtual_stages * count - 1, count)
        return (self.stages[0], self.stages[last]) if last else (self.stages[0],)

    @property
    def forward_passes(self) -> int:
        """Of all stages and all their chunks in a step."""
        return self.num_microbatches * sum(len(stage.chunks) for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionGroup:
    """Layers whose gradients are summed over the same devices."""

    layers: LayerRange
    members: tuple[DeviceRange, ...]
    """Every device that holds these layers: pipeline by pipeline, each stage's in its own order
    (dp, cp, tp). Devices that hold the same slice reduce with each other: those of equal tp
    position; where pipelines cut a layer into tp slices of different sizes, those whose slices
    overlap reduce what they share. Of experts: those of equal position in (ep, etp)."""
    degree: int
    """Ranks of one reduction, which is copies of the weights: dp * cp of all members; of experts
    dp * cp * tp / (ep * etp)."""
    transport: str
    precision: str
    """Number format in which gradients are summed and sent, a `hetplan.job.spec.Precision` value;
    `hetplan.plans.formats` says which one a job's trainer has."""
    expert: bool = False
    """Only the routed experts' weights of these layers, over the ranks that hold the same experts;
    the other weights of the layers then have a group of their own."""

    def has(self, stage: Stage) -> bool:
        """Whether the devices of a stage that holds the layers are members: all are, or none is."""
        first = stage.replicas[0].devices[0].start
        return any(first in part.devices() for part in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSynchronisation:
    """How sites that train by themselves are averaged (`hetplan.plans.local_steps`)."""

    sites: tuple[int, ...]
    """Pipelines of each site, whose weights are always equal: the first so many, then the next."""
    reduction_groups: tuple[ReductionGroup, ...]
    """Who averages the differences of which layers: every copy in all sites."""
    settings: Synchronisation
    """The job's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What runs where."""

    pipelines: tuple[Pipeline, ...]
    reduction_groups: tuple[ReductionGroup, ...]
    """Empty where no gradient is reduced (dp = 1); with `outer`, those inside of sites."""
    precision: str
    optimizer: str
    optimizer_shards: int
    """Ranks over which the optimizer state of a parameter is split; 1 is no sharding. Divides the
    copies of every stage, or is their least common multiple: then each stage splits over all of its
    ranks (`hetplan.plans.pieces.stage_shards`)."""
    padded_vocab_size: int
    """Vocabulary rounded up so that tp divides it."""
    tied_embedding_devices: tuple[DeviceRange, ...]
    """First- and last-stage devices that share a tied matrix; empty where not tied."""
    tied_embedding_precision: str | None
    """Number format in which their gradients of it are summed; None where not tied."""
    target: str
    unused_devices: tuple[DeviceRange, ...]
    sharding: Sharding = Sharding.NONE
    """What `optimizer_shards` ranks split; `none` where that is 1. Fewer shards than data-parallel
    ranks are MiCS-style groups (arXiv 2205.00119): shards inside, copies across."""
    optimizer_offload: float = 0.0
    """Part of the optimizer state kept and updated in host memory."""
    overlap: OverlapSettings = OverlapSettings()
    outer: OuterSynchronisation | None = None
    """None: all pipelines update together."""

    @property
    def site_of_pipeline(self) -> tuple[int, ...]:
        """The site of every pipeline; one without `outer`."""
        if self.outer is None:
            return (0,) * len(self.pipelines)
        return tuple(site for site, count in enumerate(self.outer.sites) for _ in range(count))

    @property
    def extra_tokens(self) -> float:
        """Part of the job's tokens that the run needs more for the same loss."""
        return 0.0 if self.outer is None else self.outer.settings.extra_tokens

    @property
    def every_group(self) -> tuple[ReductionGroup, ...]:
        """Reduction groups of steps, and those that average sites."""
        return (
            *self.reduction_groups,
            *(() if self.outer is None else self.outer.reduction_groups),
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Every stage, in the order of the pipelines."""
        return tuple(chain.from_iterable(pipeline.stages for pipeline in self.pipelines))

    def named_stages(self) -> Iterator[tuple[str, Pipeline, Stage]]:
        """Every stage with its place in the file and its pipeline."""
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                yield f"pipelines[{p}].stages[{s}]", pipeline, stage

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Every replica entry of every stage, in the order of pipelines and stages."""
        return tuple(chain.from_iterable(stage.replicas for stage in self.stages))

    @staticmethod
    def from_older_form(data: dict[str, object]) -> dict[str, object]:
        """Data of an older plan in this form (`hetplan.plans.plan`)."""
        return with_formats(with_sharding(data))


_TIED = "tied_embedding_precision"


def with_sharding(plan: dict[str, object]) -> dict[str, object]:
    """The plan's data with the kind of its sharding."""
    shards = plan.get("optimizer_shards")
    if "sharding" in plan or not isinstance(shards, int) or shards < 2:
        return plan
    return {**plan, "sharding": "optimizer"}


def with_formats(plan: dict[str, object], job: object = None) -> dict[str, object]:
    """The plan's data with the format of every reduction, as its job's trainer has it.

    `job`: the job's data; without it the target's default counts. Data that names any format is
    not older and comes back as it is.
    """
    groups = plan.get("reduction_groups")
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        return plan
    if _TIED in plan or any("precision" in each for each in groups):
        return plan
    implied = _implied(plan, job if isinstance(job, dict) else {})
    return {
        **plan,
        "reduction_groups": [{**each, "precision": implied} for each in groups],
        _TIED: implied if plan.get("tied_embedding_devices") else None,
    }


def _implied(plan: Mapping[str, object], job: Mapping[str, object]) -> object:
    """The format of gradients under the plan's target; the plan's own where nothing says."""
    own = plan.get("precision")
    trainer = job.get("trainer")
    asked = trainer.get("gradient_precision") if isinstance(trainer, dict) else None
    target = plan.get("target")
    try:
        options = TrainerOptions(gradient_precision=_precision(asked))
        found = _precision(job.get("precision")) or _precision(own)
        if found is None or not isinstance(target, str):
            return own
        return trainer_settings_of(target, found, options).gradient_precision.value
    except InputError:
        return own  # the job asks for what its target cannot run, which others say


def _precision(word: object) -> Precision | None:
    return Precision(word) if word in [each.value for each in Precision] else None


def searched_with_formats(data: dict[str, object]) -> dict[str, object]:
    """The data of a search result, its plan and the alternatives with their formats."""
    inputs = data.get("inputs")
    job = inputs.get("job") if isinstance(inputs, dict) else None
    found = dict(data)
    if isinstance(data.get("plan"), dict):
        found["plan"] = _planned(data["plan"], job)
    others = data.get("alternatives")
    if isinstance(others, list):
        found["alternatives"] = [
            {**each, "plan": _planned(each["plan"], job)}
            if isinstance(each, dict) and "plan" in each
            else each
            for each in others
        ]
    return found


def _planned(plan: object, job: object) -> object:
    return with_formats(plan, job) if isinstance(plan, dict) else plan
