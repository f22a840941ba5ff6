"""What every stage posts and waits for, in order.

A program is a stage's list of steps: passes, posted sends and receives, waits. A message is named
by (direction, hop, microbatch); hop k leads from virtual stage k to k + 1, with activations down
and gradients up. Neighbours on one stage (P = 1, the turn of a V) exchange nothing. Of joined
passes both are computed before anything of theirs is sent.

eager: a stage waits for what its next pass needs and for nothing else; receives are always posted
and sends cost their sender no wait. All schedules.

rendezvous: as torch.distributed.pipelining (torch 2.13) posts and waits.
  1f1b      Schedule1F1B. Every receive is posted just before the pass that needs it. A send of the
            warm-up or the cool-down is posted after its pass and waited for after the next one; in
            the steady state a stage posts "send what I computed, receive what I need" over one
            boundary together and waits for both. Depths of neighbours that differ by more than one
            make it wait for itself.
  gpipe     ScheduleGPipe. Receives as above; sends are waited for at the end of the forward
            passes, and of the backward passes.
  interleaved-1f1b, zb-h1, V schedules
            The runtime that all schedules with several virtual stages or split backward passes
            share (_PipelineScheduleRuntime with its default of early receives). Sends are waited
            for at the end of the step. Receives are posted early: the stages take turns, one pass
            each as soon as its input has been made, and the receive goes behind what the receiver
            has done by then. (torch counts the turns of its parameter gathering too, which can
            move a receive by a few passes.)

Exchange.MEGATRON: Megatron-LM's interleaved schedule without overlap of sends (megatron/core/
pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving). After every pass of
the warm-up and the cool-down, and after every pair between, a stage posts together what it has just
computed and what it receives next, and waits for all of it. What crosses from the last stage to the
first one, and back, is received when it has been sent, P - 1 passes before it is needed. Whole
groups of microbatches only; otherwise, and with other schedules, as torch.

Exchange.DEEPSPEED: DeepSpeed's TrainSchedule (deepspeed/runtime/pipe/schedule.py). In each of its
2 (m + P - 1) steps a stage runs one pass at most: before a forward pass it sends the gradient that
it has just computed and receives its input, before a backward pass it receives its gradient and
sends the activations that it has just computed. Each transfer holds both sides until it is over, so
nothing moves both ways at once: per microbatch a middle stage is held by four transfers, not two.
1f1b with its own depths only.

Measured with torch 2.13 and gloo on one machine's loopback (passes of 20 to 60 ms that sleep,
64 KiB messages, 2 or 3 stages, 1 to 3 chunks): every stage of Schedule1F1B, ScheduleGPipe and
ScheduleInterleaved1F1B ends 2 to 3 % later than here, the passes' own overhead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hetplan.cost.replay.times import Exchange, PipelineTimes
from hetplan.cost.schedules import forwards_first, passes
from hetplan.errors import InputError
from hetplan.plans.v_schedules import Pass, stage_of, virtual_stage_of

Message: TypeAlias = tuple[int, int, int]
"""Direction, hop, microbatch."""
DOWN, UP = 0, 1


@dataclass(frozen=True, slots=True)
class Send:
    """The message may leave from now on."""

    message: Message


@dataclass(frozen=True, slots=True)
class Receive:
    """There is room for the message from now on."""

    message: Message


@dataclass(frozen=True, slots=True)
class Wait:
    """Until every message has left, or has arrived."""

    sent: tuple[Message, ...] = ()
    received: tuple[Message, ...] = ()


Step: TypeAlias = Pass | Send | Receive | Wait


def programs(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    virtual_stages: int,
    warmup: Sequence[int] | None,
    rendezvous: bool,
    exchange: Exchange = Exchange.TORCH,
) -> tuple[tuple[Step, ...], ...]:
    """The program of every stage; an InputError where the trainer has none."""
    orders = [
        passes(
            schedule,
            stage=stage,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
            warmup=warmup,
        )
        for stage in range(num_stages)
    ]
    if not rendezvous or num_stages == 1:
        return tuple(
            tuple(_eager(stage, order, Row(schedule, num_stages, virtual_stages)))
            for stage, order in enumerate(orders)
        )
    if schedule == "1f1b":
        depths = [*map(forwards_first, orders)]
        if exchange is Exchange.DEEPSPEED:
            own = [min(num_stages - s, num_microbatches) for s in range(num_stages)]
            if depths != own:
                raise InputError(
                    f"warm-up depths {depths}; with blocking sends they are {own}, as DeepSpeed's"
                )
            return tuple(
                tuple(_one_at_a_time(s, num_stages, num_microbatches)) for s in range(num_stages)
            )
        return tuple(
            tuple(one_forward_one_backward(s, num_stages, depths[s], num_microbatches))
            for s in range(num_stages)
        )
    if exchange is Exchange.DEEPSPEED:
        raise InputError(f"schedule {schedule} with blocking sends; DeepSpeed's pipeline runs 1f1b")
    if schedule == "gpipe":
        return tuple(tuple(_gpipe(s, num_stages, order)) for s, order in enumerate(orders))
    if (
        exchange is Exchange.MEGATRON
        and schedule == "interleaved-1f1b"
        and virtual_stages > 1
        and num_microbatches % num_stages == 0
    ):
        return tuple(tuple(_batched(s, num_stages, order)) for s, order in enumerate(orders))
    return tuple(map(tuple, early_receives(orders, virtual_stages, schedule)))


def programs_of(times: PipelineTimes, rendezvous: bool) -> tuple[tuple[Step, ...], ...]:
    """The programs of the stages that these times are of."""
    return programs(
        times.schedule,
        times.num_stages,
        times.num_microbatches,
        times.virtual_stages,
        times.warmup,
        rendezvous,
        times.exchange,
    )


def ends_of_hop(message: Message, num_stages: int, schedule: str = "1f1b") -> tuple[int, int]:
    """Sending and receiving stage."""
    direction, hop, _ = message
    upper, lower = (stage_of(schedule, k, num_stages) for k in (hop, hop + 1))
    return (upper, lower) if direction == DOWN else (lower, upper)


@dataclass(frozen=True, slots=True)
class Row:
    """The virtual stages of a pipeline, and where they lie."""

    schedule: str
    num_stages: int
    virtual_stages: int = 1

    def _message(self, direction: int, hop: int, microbatch: int) -> Message | None:
        if not 0 <= hop < self.num_stages * self.virtual_stages - 1:
            return None
        message = direction, hop, microbatch
        source, target = ends_of_hop(message, self.num_stages, self.schedule)
        return None if source == target else message

    def needed(self, one: Pass, stage: int) -> Message | None:
        """The message that this pass waits for; None where its input is made on the stage."""
        at = virtual_stage_of(self.schedule, stage, one.chunk, self.num_stages)
        if one.kind == "W":
            return None
        return self._message(*((DOWN, at - 1) if one.kind == "F" else (UP, at)), one.microbatch)

    def made(self, one: Pass, stage: int) -> Message | None:
        """The message that this pass makes; None where its output is used on the stage."""
        at = virtual_stage_of(self.schedule, stage, one.chunk, self.num_stages)
        if one.kind == "W":
            return None
        return self._message(*((DOWN, at) if one.kind == "F" else (UP, at - 1)), one.microbatch)


def _units(order: Sequence[Pass]) -> Iterator[tuple[Pass, ...]]:
    """Passes one by one, joined ones together."""
    unit: tuple[Pass, ...] = ()
    for one in order:
        unit = (*unit, one)
        if not one.joined:
            yield unit
            unit = ()


def _eager(stage: int, order: Sequence[Pass], row: Row) -> Iterator[Step]:
    for unit in _units(order):
        for one in unit:
            source = row.needed(one, stage)
            if source is not None:
                yield Wait(received=(source,))
            yield one
        for one in unit:
            goal = row.made(one, stage)
            if goal is not None:
                yield Send(goal)


def _gpipe(stage: int, num_stages: int, order: Sequence[Pass]) -> Iterator[Step]:
    row = Row("gpipe", num_stages)
    for kind in ("F", "B"):
        sent: list[Message] = []
        for one in order:
            if one.kind != kind:
                continue
            source = row.needed(one, stage)
            if source is not None:
                yield Receive(source)
                yield Wait(received=(source,))
            yield one
            goal = row.made(one, stage)
            if goal is not None:
                yield Send(goal)
                sent.append(goal)
        yield Wait(sent=tuple(sent))


def one_forward_one_backward(s: int, num_stages: int, w: int, m: int) -> Iterator[Step]:
    """Schedule1F1B._step_microbatches, statement by statement, with w forward passes first."""

    def down(boundary: int, i: int) -> tuple[Message, ...]:
        return ((DOWN, boundary, i),) if 0 <= boundary < num_stages - 1 else ()

    def up(boundary: int, i: int) -> tuple[Message, ...]:
        return ((UP, boundary, i),) if 0 <= boundary < num_stages - 1 else ()

    def fused(sent: tuple[Message, ...], received: tuple[Message, ...]) -> Iterator[Step]:
        yield from map(Send, sent)
        yield from map(Receive, received)
        yield Wait(sent=sent, received=received)

    send_work: tuple[Message, ...] = ()
    forward_sends: tuple[Message, ...] = ()
    for i in range(w):
        yield from fused((), down(s - 1, i))
        yield Pass("F", 0, i)
        yield Wait(sent=send_work)
        forward_sends = down(s, i)
        if i != w - 1:
            send_work = forward_sends
            yield from map(Send, send_work)
    forwards, backwards = w, 0
    while True:
        yield from fused(forward_sends, up(s, backwards))
        yield Pass("B", 0, backwards)
        backward_sends = up(s - 1, backwards)
        backwards += 1
        if forwards == m:
            break
        yield from fused(backward_sends, down(s - 1, forwards))
        yield Pass("F", 0, forwards)
        forward_sends = down(s, forwards)
        forwards += 1
    send_work = backward_sends
    yield from map(Send, send_work)
    while backwards < m:
        yield from fused((), up(s, backwards))
        yield Pass("B", 0, backwards)
        yield Wait(sent=send_work)
        send_work = up(s - 1, backwards)
        yield from map(Send, send_work)
        backwards += 1
    yield Wait(sent=send_work)


def _one_at_a_time(s: int, num_stages: int, m: int) -> Iterator[Step]:
    """TrainSchedule.steps of one stage: even stages run forward in even steps."""

    def send(message: Message) -> Iterator[Step]:
        yield Send(message)
        yield Wait(sent=(message,))

    def receive(message: Message) -> Iterator[Step]:
        yield Receive(message)
        yield Wait(received=(message,))

    before, after = s > 0, s < num_stages - 1
    last = -1
    for step in range(2 * (m + num_stages - 1)):
        forward = (step - s) % 2 == 0
        # A microbatch reaches stage s after s steps and comes back after 2 P - 1 - s.
        i = (step - s) // 2 if forward else (step - 2 * num_stages + 1 + s) // 2
        runs, ran = 0 <= i < m, 0 <= last < m
        if forward:
            if ran and before:
                yield from send((UP, s - 1, last))
            if runs and before:
                yield from receive((DOWN, s - 1, i))
        else:
            if runs and after:
                yield from receive((UP, s, i))
            if ran and after:
                yield from send((DOWN, s, last))
        if runs:
            yield Pass("F" if forward else "B", 0, i)
        last = i


def _batched(s: int, num_stages: int, order: Sequence[Pass]) -> Iterator[Step]:
    """Megatron-LM's interleaved 1F1B of one stage."""
    forward = [one for one in order if one.kind == "F"]
    backward = [one for one in order if one.kind == "B"]
    total, chunks = len(forward), 1 + max(one.chunk for one in order)
    last, row = num_stages - 1, Row("interleaved-1f1b", num_stages, chunks)
    # The steady state begins with the forward pass of a pair.
    warmup = min(total, forwards_first(order) - (forwards_first(order) < total))

    def exchange(sent: Sequence[Pass], received: Sequence[Message | None]) -> Iterator[Step]:
        out = [row.made(one, s) for one in sent]
        posted = tuple(message for message in out if message is not None)
        awaited = tuple(message for message in received if message is not None)
        yield from map(Send, posted)
        yield from map(Receive, awaited)
        yield Wait(sent=posted, received=awaited)

    def next_input(k: int) -> Message | None:
        """Received after forward pass k."""
        if s > 0:
            return row.needed(forward[k + 1], s) if k + 1 < total else None
        return row.made(forward[k - last], last) if k >= last else None

    def next_gradient(k: int) -> Message | None:
        """Received after backward pass k; the first one after pass -1."""
        if s < last:
            return row.needed(backward[k + 1], s) if k + 1 < total else None
        return row.made(backward[k - last], 0) if k >= last else None

    if s > 0:
        yield from exchange((), (next_input(-1),))
    for k in range(warmup):
        yield forward[k]
        ahead = next_gradient(-1) if k == warmup - 1 and s < last else None
        yield from exchange((forward[k],), (next_input(k), ahead))
    for k in range(total - warmup):
        one, two = forward[warmup + k], backward[k]
        yield one
        yield two
        yield from exchange((one, two), (next_input(warmup + k), next_gradient(k)))
    for k in range(total - warmup, total):
        yield backward[k]
        yield from exchange((backward[k],), (next_gradient(k),))


def early_receives(
    orders: Sequence[Sequence[Pass]], virtual_stages: int, schedule: str = "interleaved-1f1b"
) -> list[list[Step]]:
    """Programs with receives posted as early as _PipelineScheduleRuntime posts them."""
    num_stages, row = len(orders), Row(schedule, len(orders), virtual_stages)
    units = [[*_units(order)] for order in orders]
    found: list[list[Step]] = [[] for _ in orders]
    sent: list[list[Message]] = [[] for _ in orders]
    posted: set[Message | None] = {None}
    at = [0] * num_stages
    moved = True
    while moved:
        moved = False
        for stage in range(num_stages):
            if at[stage] == len(units[stage]):
                continue
            unit = units[stage][at[stage]]
            if not all(row.needed(one, stage) in posted for one in unit):
                continue
            at[stage] += 1
            moved = True
            for one in unit:
                source = row.needed(one, stage)
                if source is not None:
                    found[stage].append(Wait(received=(source,)))
                found[stage].append(one)
            for one in unit:
                goal = row.made(one, stage)
                if goal is not None:
                    found[stage].append(Send(goal))
                    found[ends_of_hop(goal, num_stages, schedule)[1]].append(Receive(goal))
                    posted.add(goal)
                    sent[stage].append(goal)
    for program, messages in zip(found, sent, strict=True):
        program.append(Wait(sent=tuple(messages)))
    return found
