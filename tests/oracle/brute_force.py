"""Every plan of a small job, priced by a replay of its own: the judge of the search.

Written apart from what it judges. It uses the costs of single stages and boundaries (hetplan.cost)
and the rules of placement as stated in hetplan.plans.build, and nothing of hetplan.search,
hetplan.cost.replay.step or hetplan.plans.check. The replay here is a fixed point over event times:
every event is one more than all it waits for, recomputed until nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from math import ceil, log2

from hetplan.cluster.spec import Cluster, Island, Link
from hetplan.cost.priced.end_of_step import tied_embedding_terms
from hetplan.cost.stage_costs import StageCosts, boundary_costs_over, padded, stage_costs
from hetplan.cost.terms import seconds_of
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.build import Degrees
from hetplan.plans.targets import TARGETS
from hetplan.predict.predictor import Predictor


@dataclass(frozen=True)
class Optimum:
    step_seconds: float
    degrees: Degrees
    islands: tuple[str, ...]
    layers: tuple[int, ...]
    plans: int


def step_seconds(
    forward: list[float],
    backward: list[float],
    send: list[float],
    latency: list[float],
    extra: list[float],
    m: int,
    after: list[float],
    rendezvous: bool,
) -> float:
    """1F1B by events. Stage s runs min(P - s, m) forward passes, then B and F in turn."""
    stages = len(forward)
    orders = []
    for s in range(stages):
        w = min(stages - s, m)
        order = [("F", i) for i in range(w)]
        for i in range(m):
            order.append(("B", i))
            if w + i < m:
                order.append(("F", w + i))
        orders.append(order)
    start: dict[tuple[str, int, int], float] = {}
    end: dict[tuple[str, int, int], float] = {}
    left: dict[tuple[str, int, int], float] = {}
    ready: dict[tuple[str, int, int], float] = {}  # when a stage may start its next operation
    changed = True
    while changed:
        changed = False
        for s in range(stages):
            w = min(stages - s, m)
            clock = 0.0
            for at, (kind, i) in enumerate(orders[s]):
                key = (kind, s, i)
                source = s - 1 if kind == "F" else s + 1
                # Receive, posted now.
                begin = clock
                if 0 <= source < stages:
                    boundary = min(s, source)
                    message = (kind, source, i)
                    sent = ready.get(message)
                    if sent is None:
                        break
                    base = max(sent, clock + extra[boundary]) if rendezvous else sent
                    before = left.get((kind, source, i - 1), 0.0)
                    gone = max(base, before) + send[boundary]
                    if left.get(message) != gone:
                        left[message] = gone
                        changed = True
                    begin = max(begin, gone + latency[boundary])
                fused = rendezvous and w <= at <= 2 * m - w
                if fused and at > 0:
                    # The send of the operation before was posted together with this receive.
                    previous = orders[s][at - 1]
                    goal = s + 1 if previous[0] == "F" else s - 1
                    if 0 <= goal < stages:
                        out = left.get((previous[0], s, previous[1]))
                        if out is None:
                            # Not yet taken; the neighbour still has to post.
                            break
                        begin = max(begin, out)
                done = begin + (forward[s] if kind == "F" else backward[s])
                if start.get(key) != begin or end.get(key) != done:
                    start[key], end[key] = begin, done
                    changed = True
                clock = done
                post = done
                goal = s + 1 if kind == "F" else s - 1
                if rendezvous and not fused and at > 0:
                    # Warm-up and cool-down: the send before must have left before the next one.
                    previous = orders[s][at - 1]
                    if previous[0] == kind and 0 <= goal < stages:
                        out = left.get((kind, s, previous[1]))
                        # A message posted at `ready` needs its receiver.
                        if out is None:
                            ready_before = ready.get((kind, s, previous[1]))
                            if ready_before is not None:
                                break
                        else:
                            post = max(post, out)
                            clock = post
                if 0 <= goal < stages and ready.get((kind, s, i)) != post:
                    ready[kind, s, i] = post
                    changed = True
            else:
                last = ("B", s, m - 1)
                if rendezvous and s > 0 and last in left:
                    clock = max(clock, left[last])
                end["END", s, 0] = clock
    return max(end["END", s, 0] + after[s] for s in range(stages))


def optimum(model: ModelSpec, cluster: Cluster, job: Job, predictor: Predictor) -> Optimum | None:
    """The fastest of all plans; None where none fits."""
    best: Optimum | None = None
    count = 0
    trainer = TARGETS[job.target]
    for degrees in _degrees(model, cluster, job):
        costs = {
            island.name: stage_costs(model, island, job, degrees, predictor)
            for island in cluster.islands
        }
        m = job.global_batch_size // (degrees.dp * degrees.microbatch_size)

        def tied(row: tuple[Island, ...], degrees: Degrees = degrees) -> float:
            return seconds_of(
                tied_embedding_terms(
                    padded(model, job, degrees.tp),
                    cluster,
                    row[0],
                    row[-1],
                    job,
                    degrees,
                    predictor,
                )
            )

        for row in _rows(cluster, degrees, job, model.num_layers, m):
            boundary = [
                boundary_costs_over(link, model, job, degrees, predictor, ends)
                for ends, link in zip(pairwise(row), _links(cluster, row, degrees), strict=True)
            ]
            cuts = combinations(range(1, model.num_layers), len(row) - 1)
            for cut in cuts:
                edges = (0, *cut, model.num_layers)
                layers = [b - a for a, b in pairwise(edges)]
                stage = [costs[island.name] for island in row]
                if not _fits(stage, layers, m):
                    continue
                count += 1
                ends = _ends(len(row))
                forward = [
                    c.forward_seconds(n, *e) for c, n, e in zip(stage, layers, ends, strict=True)
                ]
                backward = [
                    c.backward_seconds(n, *e) for c, n, e in zip(stage, layers, ends, strict=True)
                ]
                busy = m * max(f + b for f, b in zip(forward, backward, strict=True))
                if best is not None and busy >= best.step_seconds:
                    # No stage can do its own work faster than that.
                    continue
                each = list(zip(stage, layers, ends, strict=True))
                after = [c.after_seconds(n, *e) for c, n, e in each]
                barrier = 0.0
                if job.target == "megatron":
                    # Gradients are clipped: nobody updates before all have reduced and the sum of
                    # the norms has come back.
                    leaving = [c.leaving_seconds(n, *e) for c, n, e in each]
                    after = [a - b for a, b in zip(after, leaving, strict=True)]
                    barrier = max(leaving) + max(c.norm_seconds for c in stage)
                    depth = ceil(log2(len(row)))
                    if depth:
                        hops = [
                            predictor.send(link.among(degrees.tp * degrees.dp), 4.0)
                            for link in _links(cluster, row, degrees)
                        ]
                        barrier += max(
                            2 * depth * (law.wire_latency_seconds + 4.0 * law.seconds_per_byte)
                            for law in hops
                        )
                if len(row) > 1:
                    after[0] += tied(row)
                    after[-1] += tied(row)
                step = barrier + step_seconds(
                    forward,
                    backward,
                    [b.send_forward_seconds for b in boundary],
                    [b.wire_latency_seconds for b in boundary],
                    [b.rendezvous_extra_seconds for b in boundary],
                    m,
                    after,
                    trainer.rendezvous_sends,
                )
                if best is None or step < best.step_seconds:
                    best = Optimum(step, degrees, tuple(i.name for i in row), tuple(layers), count)
    return best


def _fits(stage: list[StageCosts], layers: list[int], m: int) -> bool:
    ends = _ends(len(stage))
    for s, (cost, n, end) in enumerate(zip(stage, layers, ends, strict=True)):
        if not cost.memory(n, *end, min(len(stage) - s, m)).fits:
            return False
    return True


def _ends(count: int) -> list[tuple[bool, bool]]:
    return [(s == 0, s == count - 1) for s in range(count)]


def _degrees(model: ModelSpec, cluster: Cluster, job: Job) -> Iterator[Degrees]:
    for tp, dp, size, recompute in product(
        range(1, 9), range(1, 9), range(1, job.global_batch_size + 1), (False, True)
    ):
        pin = job.pin
        if (
            job.global_batch_size % (dp * size) == 0
            and model.num_attention_heads % tp == 0
            and model.ffn_hidden_size % tp == 0
            and (model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0)
            and pin.tp in (None, tp)
            and pin.dp in (None, dp)
            and pin.microbatch_size in (None, size)
            and pin.recompute in (None, recompute)
        ):
            yield Degrees(tp=tp, dp=dp, microbatch_size=size, full_recompute=recompute)


def _room(island: Island, degrees: Degrees, job: Job) -> int:
    size, node = degrees.tp * degrees.dp, island.devices_per_node
    if island.name in job.forbid.islands or node % degrees.tp:
        return 0
    if node % size and size % node:
        return 0
    out = {n for n in range(island.nodes) if f"{island.name}/{n}" in job.forbid.nodes}
    return (island.nodes - len(out | set(island.nodes_out))) * node // size


def _rows(
    cluster: Cluster, degrees: Degrees, job: Job, layers: int, m: int
) -> Iterator[tuple[Island, ...]]:
    pin = job.pin
    for used in range(1, len(cluster.islands) + 1):
        for order in permutations(cluster.islands, used):
            rooms = [_room(island, degrees, job) for island in order]
            for held in product(*(range(1, room + 1) for room in rooms)):
                row = tuple(i for i, n in zip(order, held, strict=True) for _ in range(n))
                if (
                    len(row) <= layers
                    and (job.target != "native" or len(row) <= m)
                    and pin.pp in (None, len(row))
                    and pin.embedding_on in (None, row[0].name, row[0].device.kind)
                    and pin.head_on in (None, row[-1].name, row[-1].device.kind)
                ):
                    yield row


def _links(cluster: Cluster, row: tuple[Island, ...], degrees: Degrees) -> Iterator[Link]:
    size = degrees.tp * degrees.dp
    at = 0
    for left, right in pairwise(row):
        if left.name != right.name:
            at = 0
            yield next(
                entry.link
                for entry in cluster.links
                if set(entry.between) == {left.name, right.name}
            )
            continue
        first, stop = at * size, (at + 2) * size - 1
        node = left.devices_per_node
        yield left.intra_node if first // node == stop // node else left.inter_node
        at += 1
