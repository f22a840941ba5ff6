"""A second counting of a small plan's traffic: every message of every rank, one by one.

Written apart from what it judges: groups come from coordinates, rings from neighbours, formulas
from the papers that the modules name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from math import gcd, lcm

from collectives_groups import link_name

from hetplan.cluster.hosts import place_of
from hetplan.cluster.spec import Cluster
from hetplan.cost.network.segments import LinkName
from hetplan.job.spec import Job
from hetplan.model.layers import Experts
from hetplan.model.spec import LayerKind, ModelSpec
from hetplan.plans.plan import Plan, RecomputeGranularity, Replica, Sharding, Stage, expand

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
"""Of one number of each format."""


class Counting:
    """Bytes from device to device by class."""

    def __init__(self, plan: Plan, model: ModelSpec, cluster: Cluster, job: Job) -> None:
        self.plan, self.model, self.cluster, self.job = plan, model, cluster, job
        self.sent: Counter[tuple[int, int, str]] = Counter()
        self.element = job.precision.bytes_per_element
        self.sequence = job.sequence_length
        for pipeline in plan.pipelines:
            for _ in range(pipeline.num_microbatches):
                for stage in pipeline.stages:
                    for replica in stage.replicas:
                        self.passes(stage, replica)
                    self.shards_of_a_microbatch(stage)
                self.hops(pipeline.stages, pipeline.schedule.virtual_stages)
            self.tied(pipeline.stages)
        self.reductions()

    def by_link(self) -> dict[tuple[LinkName, str], float]:
        found: defaultdict[tuple[LinkName, str], float] = defaultdict(float)
        for (source, target, traffic), size in self.sent.items():
            if source != target:
                found[link_name(self.cluster, source, target), traffic] += size
        return {key: size for key, size in found.items() if size > 0}

    # ---- messages

    def send(self, source: int, target: int, size: float, traffic: str) -> None:
        self.sent[source, target, traffic] += size  # type: ignore[assignment]

    def ring(self, ranks: Iterable[int], size: float, rounds: int, traffic: str) -> None:
        """`rounds` times n - 1 steps in which every rank sends size / n to the next."""

        def place(device: int) -> tuple[str, str, int, int]:
            found = place_of(self.cluster, device)
            return (found.island.region, found.island.name, found.node, device)

        ordered = sorted(ranks, key=place)
        n = len(ordered)
        for at, device in enumerate(ordered):
            for _ in range(rounds * (n - 1)):
                self.send(device, ordered[(at + 1) % n], size / n, traffic)

    def all_reduce(self, ranks: Iterable[int], size: float, traffic: str) -> None:
        self.ring(ranks, size, 2, traffic)

    def gather(self, ranks: Iterable[int], size: float, traffic: str) -> None:
        self.ring(ranks, size, 1, traffic)

    # ---- layers

    def passes(self, stage: Stage, replica: Replica) -> None:
        kinds = self.model.layers
        for chunk in stage.chunks:
            done = 0
            for position in range(chunk.start, chunk.stop):
                if kinds[position] is LayerKind.TRANSFORMER:
                    limit = stage.recompute.layers
                    full = stage.recompute.granularity is RecomputeGranularity.FULL
                    again = full and (limit is None or done < limit)
                    done += 1
                    self.transformer(replica, position, forwards=2 if again else 1)
                elif kinds[position] is LayerKind.EMBEDDING:
                    self.sum_activations(replica)
                else:
                    self.sum_activations(replica)
                    self.gather_again(replica)
                    tokens = replica.microbatch_size * self.sequence / replica.cp
                    for ranks in self.tensor(replica):
                        self.all_reduce(ranks, 4 * tokens, "tp")
                        self.all_reduce(ranks, 8 * tokens, "tp")

    def transformer(self, replica: Replica, position: int, forwards: int) -> None:
        layer = self.model.layer_at(position)
        attention, mlp = layer.attention, layer.mlp
        tokens = replica.microbatch_size * self.sequence / replica.cp
        for _ in range(forwards + 1):
            if isinstance(mlp, Experts):
                self.experts(replica, mlp, tokens)
            else:
                self.sum_activations(replica)
            self.sum_activations(replica)
        # Backward, inputs of attention and MLP; copies that experts gathered were kept.
        self.gather_again(replica)
        if not isinstance(mlp, Experts) or not self.gathers_copies(replica):
            self.gather_again(replica)
        # Keys and values once per forward pass, with their gradients twice in the backward pass.
        width = 2 * attention.head_dim * -(-attention.num_kv_heads // replica.tp)  # type: ignore[union-attr]
        for ranks in self.groups(replica, lambda dp, cp, tp: (dp, tp)):
            for at, device in enumerate(ranks):
                size = (forwards + 2) * (replica.cp - 1) * tokens * width * self.element
                ordered = sorted(ranks)
                assert ordered == ranks
                self.send(device, ranks[(at + 1) % len(ranks)], size, "cp")

    @staticmethod
    def gathers_copies(replica: Replica) -> bool:
        return replica.etp != replica.tp or replica.sequence_parallel

    def experts(self, replica: Replica, mlp: Experts, tokens: float) -> None:
        own = tokens / (replica.tp if replica.sequence_parallel else 1)
        copies = own * mlp.experts_per_token * self.model.hidden_size * self.element
        for ranks in self.expert_groups(replica, lambda copy, ep, etp: (copy, etp)):
            for source in ranks:
                for target in ranks:
                    if source != target:
                        self.send(source, target, 2 * copies / len(ranks), "ep")
        if not self.gathers_copies(replica):
            self.sum_activations(replica)
            return
        for ranks in self.expert_groups(replica, lambda copy, ep, etp: (copy, ep)):
            self.gather(ranks, copies * replica.etp, "tp")
            self.gather(ranks, copies * replica.etp, "tp")

    def sum_activations(self, replica: Replica) -> None:
        tokens = replica.microbatch_size * self.sequence / replica.cp
        size = tokens * self.model.hidden_size * self.element
        for ranks in self.tensor(replica):
            self.all_reduce(ranks, size, "tp")

    def gather_again(self, replica: Replica) -> None:
        if not replica.sequence_parallel:
            return
        tokens = replica.microbatch_size * self.sequence / replica.cp
        for ranks in self.tensor(replica):
            self.gather(ranks, tokens * self.model.hidden_size * self.element, "tp")

    # ---- groups by coordinates

    def groups(
        self, replica: Replica, same: Callable[[int, int, int], Hashable]
    ) -> list[list[int]]:
        found: defaultdict[Hashable, list[int]] = defaultdict(list)
        for at, device in enumerate(expand(replica.devices)):
            tp, cp = at % replica.tp, at // replica.tp % replica.cp
            found[same(at // replica.tp // replica.cp, cp, tp)].append(device)
        return list(found.values())

    def tensor(self, replica: Replica) -> list[list[int]]:
        return self.groups(replica, lambda dp, cp, tp: (dp, cp))

    def expert_groups(
        self, replica: Replica, same: Callable[[int, int, int], Hashable]
    ) -> list[list[int]]:
        found: defaultdict[Hashable, list[int]] = defaultdict(list)
        for at, device in enumerate(expand(replica.devices)):
            etp, ep = at % replica.etp, at // replica.etp % replica.ep
            found[same(at // replica.etp // replica.ep, ep, etp)].append(device)
        return list(found.values())

    # ---- between stages

    def hops(self, stages: tuple[Stage, ...], virtual: int) -> None:
        count = len(stages)
        for k in range(count * virtual - 1):
            left, right = stages[k % count], stages[(k + 1) % count]
            if left is not right:
                self.hop(left, right)
                self.hop(right, left)

    def hop(self, sender: Stage, receiver: Stage) -> None:
        senders = [d for replica in sender.replicas for d in expand(replica.devices)]
        total = sum(replica.num_devices for replica in receiver.replicas)
        at = 0
        for replica in receiver.replicas:
            tokens = replica.microbatch_size * self.sequence / replica.cp
            size = tokens * self.model.hidden_size * self.element
            if replica.sequence_parallel:
                size /= replica.tp
            for device in expand(replica.devices):
                self.send(senders[at * len(senders) // total], device, size, "pp")
                at += 1

    def tied(self, stages: tuple[Stage, ...]) -> None:
        if not self.model.tied_embeddings or len(stages) == 1:
            return
        first, last = stages[0].replicas[0], stages[-1].replicas[0]
        few, many = sorted((first, last), key=lambda each: each.num_devices)
        held = -(-self.model.vocab_size // max(first.tp, last.tp)) * self.model.hidden_size
        for at, device in enumerate(expand(many.devices)):
            other = expand(few.devices)[at * few.num_devices // many.num_devices]
            size = BYTES[str(self.plan.tied_embedding_precision)] * held
            self.send(device, other, size, "embedding")
            self.send(other, device, size, "embedding")

    # ---- copies of weights

    def held(self, positions: Iterable[int], replica: Replica, expert: bool, apart: bool) -> float:
        """Parameters on one rank: experts where they are dealt out apart, or all the others."""
        total = 0.0
        for position in positions:
            whole = self.model.parameters_at(position, replica.tp)
            layer = 0 < position <= self.model.num_layers
            mlp = self.model.layer_at(position).mlp if layer else None
            routed = 0
            if isinstance(mlp, Experts) and apart:
                size = 3 * self.model.hidden_size * mlp.expert_ffn_hidden_size
                routed = mlp.num_experts * size
            if expert:
                total += routed / (replica.ep * replica.etp)
            else:
                total += whole - routed / replica.tp
        ends = {0, len(self.model.layers) - 1}
        if self.model.tied_embeddings and ends <= set(positions) and not expert:
            total -= -(-self.model.vocab_size // replica.tp) * self.model.hidden_size
        return total

    def slices(
        self, replicas: list[Replica], expert: bool
    ) -> tuple[list[list[int]], Replica, float]:
        """Groups of one rank per copy, and how much of the coarsest rank each reduces."""
        cut = [each.ep * each.etp if expert else each.tp for each in replicas]
        finest = lcm(*cut)
        groups: list[list[int]] = [[] for _ in range(finest)]
        for replica, count in zip(replicas, cut, strict=True):
            devices = expand(replica.devices)
            for copy in range(len(devices) // count):
                for k in range(finest):
                    groups[k].append(devices[copy * count + k * count // finest])
        coarsest = replicas[cut.index(min(cut))]
        return groups, coarsest, min(cut) / finest

    def reductions(self) -> None:
        for group in self.plan.reduction_groups:
            positions = range(group.layers.start, group.layers.stop)
            members = set(expand(group.members))
            replicas = [
                replica
                for pipeline in self.plan.pipelines
                for stage in pipeline.stages
                for replica in stage.replicas
                if members.issuperset(expand(replica.devices))
            ]
            apart = any((r.ep, r.etp) != (1, r.tp) for r in replicas)
            groups, coarsest, part = self.slices(replicas, group.expert)
            count = part * self.held(positions, coarsest, group.expert, apart)
            for ranks in groups:
                self.reduce(ranks, count, BYTES[group.precision])

    def reduce(self, ranks: list[int], count: float, width: float) -> None:
        shards = gcd(self.plan.optimizer_shards, len(ranks))
        level = self.plan.sharding
        if shards == 1:
            self.all_reduce(ranks, width * count, "dp")
            return
        for first in range(0, len(ranks), shards):
            inside = ranks[first : first + shards]
            if level is Sharding.OPTIMIZER:
                self.gather(inside, width * count, "dp")
            if level is not Sharding.PARAMETERS:
                self.gather(inside, self.element * count, "dp")
        for at in range(shards):
            self.all_reduce(ranks[at::shards], width * count / shards, "dp")

    def shards_of_a_microbatch(self, stage: Stage) -> None:
        level = self.plan.sharding
        if level not in (Sharding.GRADIENTS, Sharding.PARAMETERS):
            return
        (width,) = {BYTES[each.precision] for each in self.plan.reduction_groups} or {0.0}
        replicas = list(stage.replicas)
        apart = any((r.ep, r.etp) != (1, r.tp) for r in replicas)
        for expert in (False, True):
            if expert and not apart:
                continue
            groups, coarsest, part = self.slices(replicas, expert)
            for chunk in stage.chunks:
                positions = range(chunk.start, chunk.stop)
                count = part * self.held(positions, coarsest, expert, apart)
                for ranks in groups:
                    shards = gcd(self.plan.optimizer_shards, len(ranks))
                    for first in range(0, len(ranks), shards):
                        inside = ranks[first : first + shards]
                        self.gather(inside, width * count, "dp")
                        if level is Sharding.PARAMETERS:
                            self.gather(inside, self.element * count, "dp")
                            self.gather(inside, self.element * count, "dp")
