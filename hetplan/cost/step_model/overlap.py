"""How much communication compute hides, and what hiding it costs the compute.

While both run, each is slower than alone: communication takes s_c times as long, compute s_k times
(they share compute units and memory bandwidth); what is left of either runs at its own speed. For
C seconds of communication and K seconds of compute (each as if alone) that start together,

    both run for  t = min(s_c C, s_k K)
    hidden        = t / s_c          part of C that needed no time of its own
    exposed       = C - hidden
    delay         = t (1 - 1 / s_k)  what compute takes longer
    elapsed       = K + delay + exposed

So hidden + exposed is the communication's time alone, and exposed + delay is by how much it makes
the step longer. Galvatron has this law (arXiv 2211.13878, overlap slow-down of its cost model).
Where 1 / s_c + 1 / s_k < 1 running both is slower than one after the other, and the law says so.

Where both are cut into n pieces that depend on each other one by one, one piece of communication
has nothing to hide behind: the last bucket of a reduction follows the last gradient, the first one
of a gathering precedes the first layer. Only the last microbatch's backward pass hides reduction,
only the first one's forward pass hides gathering. Pieces of unlike sizes are replayed one by one
(`reduction_of_chunks`, `gathering_of_chunks`), equal ones have a closed form (`in_buckets`), exact
for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Link
from hetplan.cost.arrays import Floats
from hetplan.errors import InputError

ASSUMED_COMMUNICATION_SLOWDOWN = 1.1256
"""Galvatron's measured coefficient, as its repository ships it (profile_hardware/hardware_configs/
overlap_coefficient.json; 1.146 in another version); its documentation calls 1.1 to 1.3 usual."""

ASSUMED_COMPUTE_SLOWDOWN = 1.0 / (1.0 - 20.0 / 132.0)
"""1.18: NCCL's kernels hold about 20 of the 132 multiprocessors of an H800 (VCCL, README), and what
is left computes; calculon's A100 file takes 15 % for transfers over NVLink, the same."""

_BUCKET_PARAMETERS, _BUCKET_PARAMETERS_PER_RANK = 4e7, 1e6
_MAX_BUCKETS = 4096  # 1.6e11 parameters on one rank, 330 GB of float16: no device holds more


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdowns:
    """How many times as long compute and communication take while both run."""

    compute: float = 1.0
    communication: float = 1.0
    notes: tuple[str, ...] = ()
    """What was assumed."""

    def __post_init__(self) -> None:
        for name in ("compute", "communication"):
            if not 1 <= getattr(self, name) < math.inf:
                raise InputError(
                    f"the slow-down of {name} is {getattr(self, name)}; it must be at least 1"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What communication beside compute adds to the step, and what it does not."""

    exposed_seconds: float
    """Communication that runs with no compute beside it."""
    hidden_seconds: float
    """Rest of the communication's time, as it would take alone."""
    compute_delay_seconds: float
    """What the compute beside it takes longer."""

    @property
    def added_seconds(self) -> float:
        """What the step takes longer than its compute."""
        return self.exposed_seconds + self.compute_delay_seconds

    def __add__(self, other: Overlap) -> Overlap:
        return Overlap(
            exposed_seconds=self.exposed_seconds + other.exposed_seconds,
            hidden_seconds=self.hidden_seconds + other.hidden_seconds,
            compute_delay_seconds=self.compute_delay_seconds + other.compute_delay_seconds,
        )


def slowdowns(device: DeviceKind, link: Link | None = None) -> Slowdowns:
    """What the device's entry says, or what is assumed, with a note.

    The compute units that transfers over `link` are said to take come before the assumption, not
    before the entry, which was measured.
    """
    notes = []
    compute = device.overlap_compute_slowdown
    if not compute and link is not None and link.compute_share:
        compute = 1.0 / (1.0 - link.compute_share)
    if not compute:
        compute = ASSUMED_COMPUTE_SLOWDOWN
        notes.append(f"compute beside communication takes {compute:.2f} times as long")
    communication = device.overlap_communication_slowdown
    if not communication:
        communication = ASSUMED_COMMUNICATION_SLOWDOWN
        notes.append(f"communication beside compute takes {communication:.2f} times as long")
    return Slowdowns(
        compute=compute,
        communication=communication,
        notes=tuple(f"{device.kind}: assumed that {note}" for note in notes),
    )


def send_slowdowns(device: DeviceKind, link: Link) -> Slowdowns:
    """What sends over this link cost the compute beside them.

    A transport that copies without compute units slows nothing, and nothing slows it.
    """
    if not link.compute_share:
        return Slowdowns()
    found = slowdowns(device, link)
    return Slowdowns(
        compute=1.0 / (1.0 - link.compute_share),
        communication=found.communication,
        notes=tuple(note for note in found.notes if "communication beside" in note),
    )


def not_overlapped(communication_seconds: float) -> Overlap:
    """Communication that nothing hides."""
    return Overlap(
        exposed_seconds=communication_seconds, hidden_seconds=0.0, compute_delay_seconds=0.0
    )


def beside(communication_seconds: float, compute_seconds: float, slow: Slowdowns) -> Overlap:
    """Communication that starts together with compute that does not depend on it."""
    return in_buckets(communication_seconds, compute_seconds, math.inf, slow)


def in_buckets(
    communication_seconds: float, compute_seconds: float, buckets: float, slow: Slowdowns
) -> Overlap:
    """A reduction, or a gathering, in this many equal buckets beside as many equal pieces.

    hidden = (1 - 1 / n) min(C, K s_k / s_c): whichever side is slower runs without a pause, so
    either all buckets but one are hidden or all pieces of compute but one hide something. At least
    one bucket, also of nothing. InputError for a time that is negative or no number.
    """
    if not (communication_seconds >= 0 and compute_seconds >= 0 and buckets >= 0):
        raise InputError(
            f"communication of {communication_seconds} s in {buckets} buckets beside compute of "
            f"{compute_seconds} s; none of these can be below 0"
        )
    buckets = max(1.0, buckets)
    most = min(communication_seconds, compute_seconds * slow.compute / slow.communication)
    return _overlap(communication_seconds, most * (1.0 - 1.0 / buckets), slow)


def least_added(
    communication_seconds: Floats, compute_seconds: Floats, buckets: Floats, slow: Slowdowns
) -> Floats:
    """The least that `in_buckets` adds to the step with no more compute and no more buckets."""
    most = np.minimum(
        communication_seconds, compute_seconds * (slow.compute / slow.communication)
    ) * (1.0 - 1.0 / buckets)
    per_second = 1.0 - slow.communication * (1.0 - 1.0 / slow.compute)
    # Where running both is slower than one after the other, hiding nothing is the least.
    found: Floats = communication_seconds - most * max(0.0, per_second)
    return found


def reduction_of_chunks(
    reduction_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    slow: Slowdowns,
    *,
    buckets: int,
    microbatches_per_group: int,
) -> Overlap:
    """Gradient reduction of a stage with several chunks, in the order of their backward passes.

    Per chunk: its reduction, in this many buckets, and the backward pass of one microbatch.
    Interleaved 1F1B (arXiv 2104.04473, section 2.2) ends with the last group of microbatches, all
    of them through the last chunk, then all through the one before: the last microbatch of a chunk
    is followed by a whole group in the next, and all of that hides its reduction. One message at a
    time; chunks that wait between two pieces wait for nothing here, so what is hidden is not
    overstated.
    """
    reductions, passes = list[float](), list[float]()
    for reduction, backward in zip(reduction_seconds, backward_seconds, strict=True):
        reductions += [0.0, *[reduction / buckets] * buckets]
        passes += [(microbatches_per_group - 1) * backward, *[backward / buckets] * buckets]
    both = _both_run(passes, reductions, slow.compute, slow.communication)
    return _overlap(math.fsum(reductions), both / slow.communication, slow)


def gathering_of_chunks(
    gathering_seconds: Sequence[float],
    forward_seconds: Sequence[float],
    slow: Slowdowns,
    *,
    buckets: int,
    microbatches_per_group: int,
) -> Overlap:
    """Parameter gathering before the first forward passes, which need the parameters in order.

    A chunk's first pass waits for its parameters, the passes of the group's others do not.
    """
    gatherings, passes = list[float](), list[float]()
    for gathering, forward in zip(gathering_seconds, forward_seconds, strict=True):
        gatherings += [*[gathering / buckets] * buckets, 0.0]
        passes += [*[forward / buckets] * buckets, (microbatches_per_group - 1) * forward]
    both = _both_run(gatherings, passes, slow.communication, slow.compute)
    return _overlap(math.fsum(gatherings), both / slow.communication, slow)


def exposed_ring(
    transfer_seconds: float, compute_seconds: float, ranks: int, slow: Slowdowns
) -> Overlap:
    """Transfers of a ring that are hidden behind work on the block that is already there.

    n ranks have n blocks of work and n - 1 transfers, one beside each block but the last (or, when
    results are sent, the first): ring attention (arXiv 2310.01889) with c ranks, and
    sequence-parallel collectives that are cut into a transfer per rank beside their matrix product
    (Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023).
    `transfer_seconds` is all of them, `compute_seconds` all blocks; one rank transfers nothing.
    """
    if ranks <= 1:
        return not_overlapped(0.0)
    beside_blocks = compute_seconds * (ranks - 1) / ranks
    return beside(transfer_seconds, beside_blocks, slow)


def bucket_count(parameters: float, ranks: int) -> int:
    """Buckets in which Megatron-LM reduces so many parameters' gradients over so many ranks.

    A bucket holds max(40,000,000, 1,000,000 * ranks) of them (the default that
    megatron/core/distributed/distributed_data_parallel.py sets for `--ddp-bucket-size`). At most
    `_MAX_BUCKETS` are told apart.
    """
    largest = max(_BUCKET_PARAMETERS, _BUCKET_PARAMETERS_PER_RANK * ranks)
    return min(_MAX_BUCKETS, max(1, math.ceil(parameters / largest)))


def _overlap(communication: float, hidden: float, slow: Slowdowns) -> Overlap:
    hidden = min(hidden, communication)  # sums round
    return Overlap(
        exposed_seconds=communication - hidden,
        hidden_seconds=hidden,
        compute_delay_seconds=hidden * slow.communication * (1.0 - 1.0 / slow.compute),
    )


def _both_run(
    first: Sequence[float], second: Sequence[float], first_slow: float, second_slow: float
) -> float:
    """Seconds in which both sides run when item i of `second` waits for item i of `first`.

    `first` never waits; each side does its items in order. Ends with the last item of `first`.
    """
    both, at = 0.0, 0
    left = second[0] if second else 0.0
    for index, item in enumerate(first):
        rest = item
        # Items before `index` are there: the second side works through them until this one ends.
        while at < index and rest > 0:
            wall = min(rest * first_slow, left * second_slow)
            both += wall
            if rest * first_slow < left * second_slow:
                left -= wall / second_slow
                rest = 0.0
            else:
                rest -= wall / first_slow
                at += 1
                left = second[at]
    return both
