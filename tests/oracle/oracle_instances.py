"""Random small jobs over a subset of the axes of the search; what is off is pinned by the job.

`AXES` names what a plan may choose, and what makes the choice hard. `axes_of` says which of them an
instance has on, from the instance alone: an axis is on where the target, the cluster, the model and
the job leave it at least two values. `table.csv` lists the instances of `make oracle`; targets and
axes are drawn at random until there are enough instances and every pair of axes is on together
often enough, without jobs that the oracle cannot try in full:

    python tests/oracle/oracle_instances.py     draw what table.csv lacks (minutes)
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))

import numpy as np
from oracle_optimum import Enumeration, TooManyPlansError
from oracle_price import Prices
from oracle_space import SmallSpace
from search_jobs import device, model

from hetplan.cluster.devices import HostInterface
from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, RegionLink, Transport
from hetplan.job.spec import Forbids, Job, Optimizer, Pins, Precision, TrainerOptions
from hetplan.model.layers import Experts, LayerRun
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import RecomputeModule, Sharding
from hetplan.plans.targets import TARGETS
from hetplan.predict.fit import FittedPredictor

TABLE = Path(__file__).parent / "table.csv"

AXES = {
    "islands": "which islands are used, and their order",
    "stages": "how many stages each island has",
    "layers": "how many layers each stage has",
    "dp": "data-parallel degree",
    "tp": "tensor-parallel degree",
    "cp": "context-parallel degree",
    "ep": "expert-parallel degrees (ep, etp)",
    "microbatch": "microbatch size, and with it the number of microbatches",
    "interleaving": "virtual stages",
    "depth": "warm-up depths beyond the schedule's own",
    "recompute": "none or full",
    "selective": "recomputation of core attention",
    "modules": "recomputation of norms, activations, MLPs and experts",
    "sharding": "optimizer state split or not",
    "split": "gradients, or parameters too, split among copies, or those of a node",
    "offload": "optimizer on the devices or in their hosts' memory",
    "shapes": "own degrees per mesh",
    "pipelines": "several pipelines with their shares of the batch",
    "mixed": "stages of two device kinds",
    "unions": "stages over several islands of one kind",
    "tight": "memory that not all plans fit",
    "regions": "two regions",
    "limits": "pins of ends or stages, forbidden nodes, nodes that are out",
    "tied": "embedding and head share a matrix",
    "units": "layers that differ: dense front layers, or a repeating pattern",
    "capacity": "links whose capacity several boundaries share",
    "mtp": "a layer of multi-token prediction before the head",
}
PRICED = ("capacity", "mtp")
"""Instances with one of these on are enumerated by the oracle, and priced plan by plan as
`hetplan estimate` does: these two are not in the oracle's own cost."""
FREE = tuple(name for name in AXES if name not in ("islands", "layers"))
"""What an instance may have off."""


@dataclass(frozen=True)
class Instance:
    """One small job."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    tight: bool
    """Whether memory was drawn small."""

    @property
    def shares(self) -> bool:
        """Whether regions share the capacity of the line between them."""
        return bool(self.cluster.region_links)

    @property
    def priced(self) -> bool:
        """Whether the product prices the plans (`PRICED`)."""
        return self.shares or self.model.num_mtp_layers > 0


@dataclass(frozen=True)
class Listed:
    """One row of the table."""

    number: int
    target: str
    wanted: tuple[str, ...]
    seed: int
    plans: int
    """What the oracle tries."""

    def instance(self) -> Instance:
        """The job itself."""
        return make(self.target, frozenset(self.wanted), self.seed)


def listed() -> list[Listed]:
    """Every instance of the table."""
    found = []
    for line in TABLE.read_text().splitlines()[1:]:
        number, target, wanted, seed, plans = line.split(",")
        names = tuple(wanted.split())
        found.append(Listed(int(number), target, names, int(seed), int(plans)))
    return found


def possible(target: str, wanted: frozenset[str]) -> bool:
    """Whether a target has all of these axes."""
    trainer = TARGETS[target]
    core = RecomputeModule.CORE_ATTENTION in trainer.recompute_modules
    own = trainer.own_layers_only
    has = {
        "cp": trainer.context_parallel,
        "ep": trainer.expert_parallel,
        "selective": core,
        "modules": core,
        "offload": trainer.optimizer_offload,
        "split": Sharding.PARAMETERS in trainer.sharding,
        "interleaving": "interleaved-1f1b" in trainer.schedules,
        "depth": trainer.other_warmup,
        "shapes": trainer.stages_differ,
        "pipelines": trainer.several_pipelines,
        "mixed": trainer.mixed_stages,
        "mtp": not own,
    }
    return all(has.get(name, True) for name in wanted)


def axes_of(one: Instance) -> frozenset[str]:
    """The axes that this instance leaves open."""
    job, pin, islands = one.job, one.job.pin, one.cluster.islands
    trainer = TARGETS[job.target]
    usable = [island.num_usable_devices for island in islands]
    wide = any(count > 1 for count in usable)
    experts = any(isinstance(run.layer.mlp, Experts) for run in one.model.layer_runs)
    same = [
        (a, b)
        for a, b in combinations(islands, 2)
        if (a.device.kind, a.devices_per_node) == (b.device.kind, b.devices_per_node)
    ]
    unlike = [
        (a, b)
        for a, b in combinations(islands, 2)
        if a.device.kind != b.device.kind and a.region == b.region
    ]
    # Torchtitan trains a model with a tied matrix in one stage.
    single = one.model.tied_embeddings and not trainer.tied_stages
    shared = not pin.same_degrees and pin.dp != 1
    kinds = {run.layer for run in one.model.layer_runs}
    unfused = job.trainer.fused_attention is False
    on = {
        "islands": len(islands) > 1,
        "stages": wide and pin.pp is None and not single,
        "layers": sum(usable) > 1 and pin.pp != 1 and not single,
        "dp": wide and pin.dp is None,
        "tp": any(island.devices_per_node > 1 for island in islands) and pin.tp is None,
        "cp": wide and trainer.context_parallel and pin.cp is None,
        "ep": wide and experts and trainer.expert_parallel and pin.ep is None,
        "microbatch": pin.microbatch_size is None,
        "interleaving": "interleaved-1f1b" in trainer.schedules
        and pin.virtual_stages is None
        and sum(usable) >= 3
        and not single
        and one.model.num_layers >= 6
        and job.global_batch_size % 3 == 0,
        "depth": trainer.other_warmup and pin.depth != 0,
        "recompute": pin.recompute is None,
        "selective": unfused
        and RecomputeModule.CORE_ATTENTION in trainer.recompute_modules
        and pin.recompute is None,
        "sharding": Sharding.OPTIMIZER in trainer.sharding
        and pin.sharded_optimizer is None
        and (wide or bool(same))
        and (pin.dp != 1 or pin.cp != 1),
        "modules": bool(trainer.recompute_modules) and pin.recompute is None,
        "split": Sharding.PARAMETERS in trainer.sharding
        and pin.sharding is None
        and pin.sharded_optimizer is not False
        and pin.pp in (None, 1)
        and pin.pipelines in (None, 1)
        and not pin.depth
        and wide
        and (pin.dp != 1 or pin.cp != 1),
        "offload": trainer.optimizer_offload
        and pin.optimizer_offload is None
        and any(island.host_memory_bytes for island in islands),
        "shapes": trainer.stages_differ
        and not pin.same_degrees
        and None in (pin.tp, pin.dp, pin.microbatch_size),
        "pipelines": trainer.several_pipelines and pin.pipelines != 1,
        "mixed": trainer.mixed_stages and shared and bool(unlike),
        "unions": shared and bool(same),
        "tight": one.tight,
        "regions": len({island.region for island in islands}) > 1,
        "limits": bool(pin.pp or pin.embedding_on or pin.head_on or job.forbid.nodes)
        or any(island.nodes_out for island in islands),
        "tied": one.model.tied_embeddings,
        "units": len(kinds) > 1,
        "capacity": len(islands) > 1 and one.shares,
        "mtp": one.model.num_mtp_layers > 0,
    }
    return frozenset(name for name, yes in on.items() if yes)


def make(target: str, wanted: frozenset[str], seed: int) -> Instance:
    """A job of this target with these axes on, as far as they can be; the rest is pinned."""
    rng = np.random.default_rng([seed, *target.encode()])
    cluster = _cluster(rng, wanted)
    batch = 6 if "interleaving" in wanted else int(rng.choice([4, 4, 6, 8]))
    if "pipelines" in wanted:
        batch = int(rng.choice([3, 4]) if "interleaving" not in wanted else 3)
    shape = _model(rng, wanted, target)
    if "capacity" in wanted:
        cluster = _with_capacity(cluster)
    if "mtp" in wanted:
        shape = replace(shape, num_mtp_layers=1, mtp_layer=shape.layer_runs[-1].layer)
    if "offload" in wanted:
        cluster = _with_hosts(rng, wanted, cluster)
    experts = any(isinstance(run.layer.mlp, Experts) for run in shape.layer_runs)
    busiest = _one_of(rng, 1.0, 1.3)
    job = Job(
        name="oracle",
        global_batch_size=batch,
        sequence_length=1024,
        precision=Precision.BFLOAT16 if rng.random() < 0.8 else Precision.FLOAT32,
        optimizer=Optimizer.ADAMW,
        target=target,
        gap=0.0,
        expert_load_factor=busiest if experts else 1.0,
        trainer=TrainerOptions(fused_attention=False if "selective" in wanted else None),
        pin=_pins(rng, wanted, target, cluster, shape, batch),
        forbid=_forbids(rng, wanted, cluster),
    )
    return Instance(shape, cluster, job, "tight" in wanted)


def _one_of(rng: np.random.Generator, *values: float) -> float:
    return float(rng.choice(values))


def _cluster(rng: np.random.Generator, wanted: frozenset[str]) -> Cluster:
    count = 2
    if "unions" in wanted or rng.random() < 0.2:
        count = 3
    two_regions = "regions" in wanted
    # What shares stages lies in one region; the last island may be elsewhere.
    kinds = ["a", "a", "b"] if "unions" in wanted else ["a", "b", "c"][:count]
    speeds = {kind: rng.uniform(30, 200) for kind in kinds}
    tensor = bool({"tp", "cp", "ep"} & wanted)
    several = bool({"dp", "sharding", "stages"} & wanted) or tensor
    islands: list[Island] = []
    budget = 5 if {"pipelines", "mixed"} & wanted else 6
    for at, kind in enumerate(kinds):
        left = budget - sum(each.num_devices for each in islands) - (len(kinds) - at - 1)
        node = 2 if tensor and left >= 2 and (at == 0 or rng.random() < 0.5) else 1
        if kinds[:at].count(kind):
            node = next(
                each.devices_per_node for each in islands if each.device.kind == f"kind-{kind}"
            )
        nodes = 1
        if node * 2 <= left and (rng.random() < 0.4 or (several and at == 0 and node == 1)):
            nodes = 2
        if "interleaving" in wanted and at == 0:
            nodes = max(nodes, min(2, left // node))
        # The only place where regions differ: between a pair that mixed stages do not need.
        region = "east" if two_regions and at == len(kinds) - 1 else "west"
        if two_regions and "mixed" in wanted and len(kinds) == 2:
            region = "west"
        islands.append(_island(rng, wanted, at, kind, speeds[kind], nodes, node, region))
    if two_regions and "mixed" in wanted and len(islands) == 2:
        islands.append(_island(rng, wanted, 2, "c", rng.uniform(30, 200), 1, 1, "east"))
    if two_regions and "unions" in wanted and "mixed" in wanted:
        # The odd kind with one of the pair; the pair's other island is far away.
        islands[1] = replace(islands[1], region="east")
        islands[2] = replace(islands[2], region="west")
    near, far = _one_of(rng, 0.5, 2.0, 20.0), _one_of(rng, 0.2, 1.0)
    wait = _one_of(rng, 0.002, 0.02)
    return Cluster(
        name="oracle",
        islands=tuple(islands),
        links=tuple(
            IslandLink(
                between=(a.name, b.name),
                link=Link(
                    bandwidth_bytes_per_second=(near if a.region == b.region else far) * 1e9,
                    latency_seconds=1e-4 if a.region == b.region else wait,
                    transport=Transport.HOST_STAGED,
                ),
            )
            for a, b in combinations(islands, 2)
        ),
    )


def _with_hosts(rng: np.random.Generator, wanted: frozenset[str], cluster: Cluster) -> Cluster:
    """Hosts with memory for an optimizer, most of them."""
    islands = []
    for island in cluster.islands:
        size = _one_of(rng, 0.4, 1.0, 4.0) if "tight" in wanted else 60.0
        islands.append(
            replace(
                island,
                device=replace(island.device, host=HostInterface(pcie_generation=4, lanes=16)),
                host_memory_bytes=None if rng.random() < 0.15 else size * 1e9,
            )
        )
    return replace(cluster, islands=tuple(islands))


def _with_capacity(cluster: Cluster) -> Cluster:
    """All islands of two regions share one line; the middle one of three lies apart."""
    islands = cluster.islands
    if len({island.region for island in islands}) == 1:
        islands = (islands[0], replace(islands[1], region="east"), *islands[2:])
    region = {island.name: island.region for island in islands}
    far = next(
        entry.link for entry in cluster.links if len({region[name] for name in entry.between}) == 2
    )
    return replace(
        cluster,
        islands=islands,
        links=tuple(
            entry for entry in cluster.links if len({region[name] for name in entry.between}) == 1
        ),
        region_links=(
            RegionLink(
                between=("west", "east"),
                link=replace(
                    far,
                    bandwidth_bytes_per_second=far.bandwidth_bytes_per_second / 4,
                    shared_bandwidth_bytes_per_second=far.bandwidth_bytes_per_second / 4,
                ),
            ),
        ),
    )


def _island(
    rng: np.random.Generator,
    wanted: frozenset[str],
    at: int,
    kind: str,
    speed: float,
    nodes: int,
    node: int,
    region: str,
) -> Island:
    memory = _one_of(rng, 0.5, 0.8, 1.3, 2.5) if "tight" in wanted else 60.0
    if {"tight", "modules"} <= wanted:
        memory = float(rng.uniform(0.3, 1.2))  # what modules keep is some of it
    between = _one_of(rng, 0.5, 5.0, 50.0)
    out: tuple[int, ...] = ()
    if "limits" in wanted and nodes > 1 and rng.random() < 0.2:
        out = (0,)

    def link(gigabytes: float, wait: float) -> Link:
        return Link(
            bandwidth_bytes_per_second=gigabytes * 1e9,
            latency_seconds=wait,
            transport=Transport.DEVICE_DIRECT,
        )

    return Island(
        name=f"i{at}",
        region=region,
        device=replace(
            device(f"kind-{kind}", speed, memory),
            peak_flops_per_second=(("bfloat16", speed * 1e12), ("float32", speed * 5e11)),
        ),
        nodes=nodes,
        devices_per_node=node,
        intra_node=link(10 * between, 5e-6),
        inter_node=link(between, 2e-5),
        memory_bytes=memory * 1e9,
        nodes_out=out,
    )


def _model(rng: np.random.Generator, wanted: frozenset[str], target: str) -> ModelSpec:
    least, most = (6, 8) if "interleaving" in wanted else (3, 8)
    if {"pipelines", "recompute", "shapes", "selective"} & wanted and least == 3:
        most = 6
    layers = int(rng.integers(least, most + 1))
    # Virtual stages need several stages, over which not every target ties.
    untied = "interleaving" in wanted and not TARGETS[target].tied_stages
    found: ModelSpec = model(layers, tied="tied" in wanted and not untied)
    found = replace(found, name="oracle", vocab_size=int(rng.choice([4096, 4000, 4001])))
    if not {"ep", "units"} & wanted:
        return found
    plain = found.layer_runs[0].layer
    routed = replace(
        plain, mlp=Experts(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=704)
    )
    runs: tuple[LayerRun, ...] = (LayerRun(count=layers, layer=routed),)
    if "units" in wanted and layers >= 6 and rng.random() < 0.4 and "interleaving" not in wanted:
        pair = (LayerRun(count=1, layer=plain), LayerRun(count=1, layer=routed))
        runs = pair * (layers // 2)
    elif "units" in wanted:
        layers = max(4, layers)
        front = 1
        rest = max(layers - front, 6) if "interleaving" in wanted else layers - front
        runs = (LayerRun(count=front, layer=plain), LayerRun(count=rest, layer=routed))
    return replace(found, layer_runs=runs)


def _pins(
    rng: np.random.Generator,
    wanted: frozenset[str],
    target: str,
    cluster: Cluster,
    shape: ModelSpec,
    batch: int,
) -> Pins:
    trainer = TARGETS[target]
    even = all(island.devices_per_node % 2 == 0 for island in cluster.islands)
    shared = bool({"unions", "mixed"} & wanted)
    tp = None if "tp" in wanted else 2 if even and rng.random() < 0.3 else 1
    dp = None if "dp" in wanted else 2 if shared else 1
    together = bool({"shapes", "unions", "mixed"} & wanted)
    recompute = None if {"recompute", "selective"} & wanted else bool(rng.random() < 0.2)
    pipelines: int | None = 1
    if "pipelines" in wanted:
        pipelines = 2 if cluster.num_devices > 3 or rng.random() < 0.5 else None
    pin = Pins(
        tp=tp,
        dp=dp,
        cp=None if "cp" in wanted else 1,
        ep=None if "ep" in wanted else 1,
        microbatch_size=None if "microbatch" in wanted else int(rng.choice([1, 1, 2])),
        recompute=recompute,
        virtual_stages=None if "interleaving" in wanted else 1,
        depth=None if "depth" in wanted else 0,
        sharded_optimizer=None if "sharding" in wanted else bool(dp == 2 and rng.random() < 0.4),
        pipelines=pipelines if trainer.several_pipelines else None,
        same_degrees=None if together or not trainer.stages_differ else True,
    )
    if "split" in wanted:
        # What is split needs copies.
        pin = replace(pin, sharded_optimizer=None, dp=None)
    elif Sharding.PARAMETERS in trainer.sharding and pin.sharded_optimizer is not False:
        sharded = None if "sharding" in wanted else Sharding.OPTIMIZER
        pin = replace(pin, sharding=sharded)
    if "offload" in wanted and rng.random() < 0.15:
        pin = replace(pin, optimizer_offload=0.5)
    if batch % ((pin.microbatch_size or 1) * (dp or 1)):
        pin = replace(pin, microbatch_size=1)
    if not trainer.stages_differ and not together:
        pin = replace(pin, same_degrees=True)
    if "limits" in wanted:
        kind = int(rng.integers(3))
        names = [island.name for island in cluster.islands]
        if kind == 0:
            pin = replace(pin, pp=int(rng.integers(2, 4)))
        elif kind == 1:
            pin = replace(pin, embedding_on=str(rng.choice(names)))
        else:
            pin = replace(pin, head_on=cluster.islands[0].device.kind)
    return pin


def _forbids(rng: np.random.Generator, wanted: frozenset[str], cluster: Cluster) -> Forbids:
    if "limits" not in wanted or rng.random() < 0.6:
        return Forbids()
    large = [island for island in cluster.islands if island.nodes > 1 and not island.nodes_out]
    return Forbids(nodes=(f"{large[0].name}/1",) if large else ())


# ---- the table

MIN_INSTANCES = 2000
MIN_TOGETHER = 100
MIN_PRICED = 25
"""Of pairs with an axis that the product prices."""
FEW = ("modules", "split", "offload", *PRICED)
"""Axes whose pairs need no more than that."""
MAX_PRICED_PLANS = 400
MAX_PLANS = 10_000
MAX_DEVICES = 6
MAX_EMPTY = 0.02
"""Part of the instances that may have no plan by their divisors alone."""
TARGET_WEIGHTS = {
    "any": 0.36,
    "native": 0.22,
    "megatron": 0.18,
    "flagscale": 0.12,
    "torchtitan": 0.12,
}

Pair = tuple[str, str]


def pairs_of(rows: list[frozenset[str]]) -> Counter[Pair]:
    """How many of these have both axes on."""
    found: Counter[Pair] = Counter()
    for on in rows:
        found.update(combinations([name for name in AXES if name in on], 2))
    return found


def every_pair() -> Iterator[Pair]:
    """All pairs, in the order of `AXES`."""
    return combinations(AXES, 2)


def least_of(pair: Pair) -> int:
    """In how many instances a pair has to be on."""
    return MIN_PRICED if set(pair) & set(FEW) else MIN_TOGETHER


def draw() -> list[Listed]:
    """The table's instances, and more until there are enough; equal for equal code and table."""
    found = listed() if TABLE.is_file() else []
    rng = np.random.default_rng([20261121, len(found)])
    predictor = FittedPredictor.datasheet_only()
    together = pairs_of([axes_of(row.instance()) for row in found])
    empty = sum(not row.plans for row in found)
    seed = max((row.seed for row in found), default=0)
    while (
        len(found) < MIN_INSTANCES
        or min(together[pair] - least_of(pair) for pair in every_pair()) < 0
    ):
        seed += 1
        target = str(rng.choice([*TARGET_WEIGHTS], p=[*TARGET_WEIGHTS.values()]))
        scarce = min(every_pair(), key=lambda pair: together[pair] / least_of(pair))
        part = {name: 0.04 if name in PRICED else 0.36 for name in FREE}
        wanted = {name for name in FREE if rng.random() < part[name]} | set(scarce) & set(FREE)
        wanted = {name for name in wanted if possible(target, frozenset({name}))}
        names = tuple(name for name in FREE if name in wanted)
        one = Listed(len(found), target, names, seed, 0).instance()
        if one.cluster.num_devices > MAX_DEVICES or one.cluster.num_devices < 2:
            continue
        on = axes_of(one)
        full = len(found) >= MIN_INSTANCES
        if full and not any(together[pair] < least_of(pair) for pair in pairs_of([on])):
            continue
        prices = Prices(one.model, one.cluster, one.job, predictor)
        try:
            space = SmallSpace(one.model, one.cluster, one.job)
            most = MAX_PRICED_PLANS if one.priced else MAX_PLANS
            every = Enumeration(space, prices, most, only_count=True)
            every.run()
        except TooManyPlansError:
            continue
        if not every.plans:
            if empty >= MAX_EMPTY * len(found):
                continue
            empty += 1
        together.update(pairs_of([on]))
        found.append(Listed(len(found), target, names, seed, every.plans))
    return found


def write_table(rows: list[Listed]) -> None:
    """table.csv."""
    lines = ["number,target,wanted,seed,plans"]
    lines += [f"{r.number},{r.target},{' '.join(r.wanted)},{r.seed},{r.plans}" for r in rows]
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_table(draw())
