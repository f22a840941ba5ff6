"""From a plan and its estimate to the days of the whole run.

Defaults for what the job leaves out, besides the failure rates (`hetplan.cost.goodput.parts`):

storage     the site's, or a rate of each host in use (`hetplan.cost.goodput.storage`)
detection   10 min, after which torch.distributed gives up a collective of NCCL (its default since
            pytorch/pytorch#110947)
restart     no wait: a spare host is ready
failover    10 s until a backup path takes over (VCCL, `hetplan.cost.goodput.lost_nic`), a day
            until the failed one is repaired, which is our guess of when somebody comes
host port   16 lanes of PCIe 4, where the catalogue has none for the kind
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hetplan.cluster.devices import HostInterface
from hetplan.cluster.spec import Cluster, Storage
from hetplan.cost.estimate_values import Estimate
from hetplan.cost.goodput.lost_nic import DETECTION_SECONDS
from hetplan.cost.goodput.parts import (
    LINE,
    Failing,
    UsedIsland,
    failing,
    survives_a_host,
    used_islands,
)
from hetplan.cost.goodput.renewal import Renewal, speed
from hetplan.cost.goodput.startup import (
    MLPERF,
    SCALABLE_GROUPED_SECONDS,
    StartUp,
    ranks_times_stages,
)
from hetplan.cost.goodput.storage import BYTES_PER_HOST_SECOND, data_seconds, storage_of
from hetplan.cost.goodput.values import (
    SECONDS_PER_DAY,
    Cause,
    Checkpoint,
    Goodput,
    LostSeconds,
    OtherInterval,
)
from hetplan.cost.traffic import checkpoint_bytes, checkpoint_bytes_per_parameter
from hetplan.errors import Fault, InputError
from hetplan.job.run import Run
from hetplan.job.spec import Job
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import is_link, link_cause

NOTICE_SECONDS = 600.0
REPAIR_SECONDS = SECONDS_PER_DAY
HOST_PORT = HostInterface(pcie_generation=4, lanes=16)


def goodput(
    plan: Plan, estimate: Estimate, model: ModelSpec, cluster: Cluster, job: Job
) -> Goodput:
    """The whole run of a priced plan; the job must say how many tokens that is."""
    if job.total_tokens is None:
        message = "is not given; say how long the run is, as in total_tokens: 2T"
        raise InputError(Fault(field="total_tokens", message=message))
    used = used_islands(plan, cluster)
    start_up = start_up_of(plan, model, job)
    survives = job.run.peer_recovery and survives_a_host(plan, cluster)
    storage = storage_of(used, cluster, job)
    sites = [cluster.site_of(each.island.region) for each in used]
    assumed = not job.run.storage_bytes_per_second and not all(s and s.storage for s in sites)
    whole, line = _link_share(estimate, used), _line_share(estimate, used, plan, cluster)
    shares = whole - line, line
    course = _Course(
        steps=job.total_tokens
        * (1.0 + plan.extra_tokens)
        / (estimate.tokens_per_second * estimate.step_seconds),
        given_interval=job.checkpoint_interval_steps,
        run=job.run,
        failing=failing(used, job.run, *shares),
        start_up=start_up,
        checkpoint=_checkpoint(plan, estimate, model, job, used, storage, survives),
        data_seconds=data_seconds(used, storage[0].read_bytes_per_second, plan, model, job),
        from_peers=survives,
    )
    other = replace(job.run, failover=not job.run.failover)
    flipped = replace(course, run=other, failing=failing(used, other, *shares))
    step, (low, high, share) = estimate.step_seconds, estimate.step_range
    interval, best = course.interval(step), course.best_interval(step)
    fast = replace(course, start_up=start_up.least)
    return Goodput(
        total_tokens=job.total_tokens,
        work_seconds=course.steps * step,
        seconds=course.seconds(step, interval),
        low_seconds=fast.seconds(low, fast.interval(low) if start_up.extrapolates else interval),
        high_seconds=course.seconds(high, interval),
        share=share,
        lost=tuple(course.lost(step, interval)),
        parts=course.failing.parts,
        start_up=start_up,
        checkpoint=course.checkpoint,
        recovery_seconds=course.recovery_seconds,
        interval_steps=interval,
        best_interval_steps=best,
        others=tuple(
            OtherInterval(interval_steps=count, seconds=course.seconds(step, count))
            for count in (best // 2, 2 * best)
            if course.renewal.failures_per_second and not survives
            if count and count == replace(course, given_interval=count).interval(step)
        ),
        other_failover_seconds=flipped.seconds(step, flipped.interval(step)),
        from_peers=survives,
        notes=tuple(_notes(course, job, assumed)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """A run in everything but the seconds of its steps and its checkpoint interval."""

    steps: float
    given_interval: int | None
    run: Run
    failing: Failing
    start_up: StartUp
    checkpoint: Checkpoint
    from_peers: bool
    data_seconds: float
    """Until the tokens of a step are there; no step is shorter."""

    @property
    def detection_seconds(self) -> float:
        return _or(self.run.detection_seconds, NOTICE_SECONDS)

    @property
    def recovery_seconds(self) -> float:
        """From a failure to the first step; what loads a checkpoint loads the weights too."""
        start = self.start_up
        return (
            self.detection_seconds
            + (self.run.restart_seconds or 0.0)
            + start.seconds
            - start.loaded_seconds
            + max(start.loaded_seconds, self.checkpoint.load_seconds)
        )

    @property
    def renewal(self) -> Renewal:
        """Of segments between checkpoints; from peers, of steps, after which nothing is saved."""
        return Renewal(
            failures_per_second=self.failing.restarts_per_second,
            save_seconds=0.0 if self.from_peers else self.checkpoint.save_seconds,
            delay_seconds=0.0 if self.from_peers else self.checkpoint.delay_seconds,
            recovery_seconds=self.recovery_seconds,
        )

    def moving_seconds(self, step_seconds: float) -> float:
        """Mean step, slower backup paths and waits for data counted."""
        slow = speed(
            self.failing.slowings,
            _or(self.run.failover_detection_seconds, DETECTION_SECONDS),
            _or(self.run.repair_seconds, REPAIR_SECONDS),
        )
        return max(step_seconds, self.data_seconds) / slow

    def best_interval(self, step_seconds: float) -> int:
        """Steps between checkpoints; the whole run where none is ever read."""
        if self.from_peers:
            return max(1, round(self.steps))
        return self.renewal.best_steps(self.moving_seconds(step_seconds), self.steps)

    def interval(self, step_seconds: float) -> int:
        """The job's, or the best; no save begins before the one before it is written."""
        if self.given_interval is None:
            return self.best_interval(step_seconds)
        writing = self.renewal.delay_seconds - self.renewal.save_seconds
        least = math.ceil(writing / self.moving_seconds(step_seconds))
        return min(max(self.given_interval, least), max(1, math.ceil(self.steps)))

    def seconds(self, step_seconds: float, interval_steps: int) -> float:
        """The whole run, its first start-up included."""
        return self.start_up.seconds + self._run_seconds(step_seconds, interval_steps)

    def _run_seconds(self, step_seconds: float, interval_steps: int) -> float:
        step = self.moving_seconds(step_seconds)
        if self.from_peers:
            saves = self.steps / interval_steps * self.checkpoint.save_seconds
            return (self.steps * step + saves) * self.renewal.stretch(step)
        return self.steps / interval_steps * self.renewal.segment_seconds(interval_steps * step)

    def lost(self, step_seconds: float, interval_steps: int) -> Iterator[LostSeconds]:
        """What each cause adds; nothing where the run never ends."""
        whole, steps = self._run_seconds(step_seconds, interval_steps), self.steps
        if math.isinf(whole):
            return
        renewal, moving = self.renewal, self.moving_seconds(step_seconds)
        noticing = whole * renewal.share_before(self.detection_seconds)
        down = whole * renewal.share_before(self.recovery_seconds)
        saving = steps / interval_steps * self.checkpoint.save_seconds
        again = max(0.0, whole - down - saving - steps * moving)
        fed = max(step_seconds, self.data_seconds)
        for cause, seconds in (
            (Cause.START_UP, self.start_up.seconds),
            (Cause.SAVING, saving),
            (Cause.LOST_WORK, again),
            (Cause.DETECTION, noticing),
            (Cause.RESTART, down - noticing),
            (Cause.FAILOVER, steps * (moving - fed)),
            (Cause.DATA, steps * (fed - step_seconds)),
        ):
            if seconds or cause is not Cause.DATA:
                yield LostSeconds(cause=cause, seconds=seconds)


def _or(given: float | None, usual: float) -> float:
    return usual if given is None else given


def start_up_of(plan: Plan, model: ModelSpec, job: Job) -> StartUp:
    """One start of the run: the job's own, or by the law."""
    run = job.run
    if run.start_up_seconds is not None:
        return StartUp(
            started_seconds=run.start_up_seconds,
            grouped_seconds=0.0,
            loaded_seconds=0.0,
            compiled_seconds=0.0,
        )
    parameters = sum(checkpoint_bytes(plan, model, job)) / checkpoint_bytes_per_parameter(job)
    return MLPERF.start_up(ranks_times_stages(plan), parameters, run.compiles)


def _checkpoint(
    plan: Plan,
    estimate: Estimate,
    model: ModelSpec,
    job: Job,
    used: tuple[UsedIsland, ...],
    storage: tuple[Storage, float],
    from_peers: bool,
) -> Checkpoint:
    """Bytes and seconds of saving and reading; ranks that hold the same share the writing.

    An optimizer in host memory is read with all that lies there, a gradient too: some too much.
    """
    run, stages, (rates, kept) = job.run, plan.stages, storage
    saved = checkpoint_bytes(plan, model, job)
    states = [
        use.parameter_bytes + use.optimizer_bytes + use.host_bytes
        for use in (each.memory for each in estimate.stages)
    ]
    counts = [sum(each.num_devices for each in stage.replicas) for stage in stages]
    written = math.fsum(saved) / rates.write_bytes_per_second
    copied = max(size / count for size, count in zip(saved, counts, strict=False))
    port = min((each.island.device.host or HOST_PORT).bandwidth_bytes_per_second for each in used)
    link = min(each.island.inter_node.bandwidth_bytes_per_second for each in used)
    whole = math.fsum(state * count for state, count in zip(states, counts, strict=True))
    read = math.fsum(saved) if run.one_reader else whole
    load = read / rates.read_bytes_per_second + (max(states) / link if run.one_reader else 0.0)
    # Transfers between hosts are longer while a checkpoint is written beside them.
    slower = 1.0 + _link_share(estimate, used) * (1.0 / kept - 1.0)
    if from_peers:
        read, load = 0.0, max(states) / link
    return Checkpoint(
        saved_bytes=math.fsum(saved),
        read_bytes=read,
        save_seconds=copied / port + written * (1.0 - 1.0 / slower)
        if run.asynchronous_saving
        else written,
        delay_seconds=written if run.asynchronous_saving else 0.0,
        load_seconds=load,
    )


def _link_share(estimate: Estimate, used: Iterable[UsedIsland]) -> float:
    """Part of the step in transfers between hosts."""
    inside = {link_cause(each.island.intra_node) for each in used}
    between = (each for each in estimate.causes if is_link(each.cause))
    found = math.fsum(each.seconds for each in between if each.cause not in inside)
    return found / estimate.step_seconds


def _line_share(
    estimate: Estimate, used: Sequence[UsedIsland], plan: Plan, cluster: Cluster
) -> float:
    """Part of the step in transfers over lines that all who send between two regions share: a lost
    NIC makes none of them longer.
    """
    pairs = [(a.island, b.island) for a, b in combinations(used, 2)]
    links = [cluster.link_between(a.name, b.name) for a, b in pairs if a.region != b.region]
    lines = {link for link in links if link.shared_bandwidth_bytes_per_second is not None}
    # Predictions name a line by what each sender finds; these are parts of a stage's devices.
    sizes = {sum(each.num_devices for each in stage.replicas) for stage in plan.stages}
    sizes |= {each.num_devices for each in plan.replicas}
    senders = {n for size in sizes for n in range(1, size + 1) if size % n == 0} if lines else ()
    names = {link_cause(line.among(count)) for line in lines for count in senders}
    found = math.fsum(each.seconds for each in estimate.causes if each.cause in names)
    return found / estimate.step_seconds


def _notes(course: _Course, job: Job, storage_assumed: bool) -> Iterator[str]:
    """Which figures are defaults, and what of the job could not be had."""
    run = job.run
    assumed = [each.part for each in course.failing.parts if each.assumed]
    if assumed:
        yield (
            f"failures of {', '.join(dict.fromkeys(assumed))} as in Llama 3's 54 days on 16,384 "
            "H100 (arXiv 2407.21783)"
        )
    if run.start_up_seconds is None:
        within = f"a factor of {math.exp(MLPERF.log_halfwidth):.3g}"
        yield f"start-up by a law fitted on MLPerf's results, 90 % within {within}"
        if course.start_up.extrapolates:
            yield (
                "this plan has more ranks and stages than any of them: the range begins with "
                f"process groups created in {SCALABLE_GROUPED_SECONDS:g} s, as MegaScale's"
            )
    if storage_assumed:
        rate = BYTES_PER_HOST_SECOND / 1e9
        yield f"storage of {rate:.3g} GB/s a host, as Llama 3's"
    if run.detection_seconds is None:
        yield f"failures noticed in {NOTICE_SECONDS / 60:g} min, NCCL's time-out in PyTorch"
    if run.restart_seconds is None:
        yield "a spare host ready at once"
    if run.failover and run.repair_seconds is None:
        yield "failed paths repaired after a day"
    lines = [each for each in course.failing.parts if each.part == LINE]
    if run.failover and any(not each.falls_back for each in lines):
        yield "a line that fails ends the run, as kept_bandwidth is not given"
    if run.peer_recovery and not course.from_peers:
        yield "peer_recovery is left out: some state lies on one host alone, or may do so"
