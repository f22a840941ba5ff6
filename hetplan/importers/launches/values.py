"""What an existing launch says: its settings as written, and as facts in one vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetplan.errors import Fault
from hetplan.job.spec import TrainerOptions
from hetplan.plans.plan import OverlapSettings, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One flag, key or variable of a launch."""

    name: str
    """Without leading dashes: `tensor-model-parallel-size`; of YAML the dotted path."""
    values: tuple[str, ...]
    """Empty for a flag without value."""
    file: str
    line: int
    """1-based."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchHost:
    """A line of a hostfile, or a row of an emitted folder's agents."""

    name: str
    devices: int | None
    type: str = ""
    """FlagScale's device type; empty: not said."""
    local_devices: tuple[int, ...] = ()
    """Devices of the host in the order of its ranks; empty: 0 up to `devices`."""
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchText:
    """A launch as it was written."""

    trainer: str
    """megatron, flagscale or torchtitan."""
    settings: tuple[Setting, ...]
    """In order; of a flag that is given twice the last one counts."""
    environment: tuple[Setting, ...] = ()
    """Variables that it sets."""
    hosts: tuple[LaunchHost, ...] = ()
    nodes: int | None = None
    """torchrun --nnodes (or SBATCH --nodes); None: not said."""
    devices_per_node: int | None = None
    """torchrun --nproc-per-node; None: not said, or it differs."""
    unread: tuple[Setting, ...] = ()
    """Words whose value only the host's environment knows, as in `$TP`: a flag with such a value
    under its name; words that stand for whole flags, or nothing, under an empty one."""
    stray: tuple[Setting, ...] = ()
    """Flags at the begin of a command: bash runs them as a program, and no trainer gets them; under
    an empty name the blank with which the trainer's command ends."""
    remarks: tuple[str, ...] = ()
    """What of the files was left alone, a line each with its place."""

    def last(self, *names: str) -> Setting | None:
        """The setting that counts, under any of these names; None where there is none."""
        return next((each for each in reversed(self.settings) if each.name in names), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchMesh:
    """Stages of a launch that share degrees: all of them, or one mesh of FlagScale."""

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int
    microbatch_size: int
    etp: int = 1
    device_type: str = ""
    """FlagScale's; empty: not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """What a launch asks of its trainer, the trainer's defaults filled in."""

    text: LaunchText
    world_size: int
    meshes: tuple[LaunchMesh, ...]
    """In pipeline order; one, but for FlagScale's."""
    layers: tuple[tuple[int, ...], ...]
    """Transformer layers of each stage, one number per virtual stage, as the trainer really places
    them (where it drops layers, without those)."""
    num_layers: int | None
    """As the launch says; None: it does not."""
    global_batch_size: int
    num_microbatches: int
    """Rounded down where the batch is not divisible."""
    sequence_length: int | None
    vocab_size: int | None
    """Before padding."""
    vocab_multiple: int
    sequence_parallel: bool
    sharded_optimizer: bool
    recompute: str
    """none, selective or full."""
    data_outermost: bool
    """Ranks count tp, cp, pp, dp."""
    precision: str
    tied_embeddings: bool | None
    """None: the launch does not say."""
    stage_recompute: tuple[Recompute, ...] = ()
    """Of each stage; empty: nothing is computed again."""
    optimizer: str = "adamw"
    optimizer_instances: int = 1
    """Groups of data-parallel ranks that each keep a whole optimizer state."""
    optimizer_offload: float = 0.0
    overlap: OverlapSettings = field(default_factory=OverlapSettings)
    schedule: str = "1f1b"
    """One of `hetplan.plans.plan.SCHEDULES`; interleaved-1f1b with virtual stages."""
    gradient_clipping: bool = True
    options: TrainerOptions = field(default_factory=TrainerOptions)
    """What the launch says of the trainer's own choices; None where it says nothing."""
    refusals: tuple[Fault, ...] = ()
    """What it asks for that no plan has."""
    remarks: tuple[str, ...] = ()
    """What plans have a little otherwise, a line each."""

    @property
    def virtual_stages(self) -> int:
        """Layer ranges of each stage."""
        return len(self.layers[0]) if self.layers else 1

    @property
    def pp(self) -> int:
        """Stages of all meshes."""
        return sum(mesh.pp for mesh in self.meshes)


def visible_devices(text: str) -> tuple[int, ...]:
    """Numbers of a list as in CUDA_VISIBLE_DEVICES=0,2; empty for names and for what is none."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in parts):
        return ()
    numbers = tuple(map(int, parts))
    return numbers if len(set(numbers)) == len(numbers) else ()
