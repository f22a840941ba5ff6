"""How a rank runs one step of its stage: the operations that the cost model replays, one by one.

The order of passes, sends, receives and waits is that of `hetplan.cost.replay.programs`; nothing
here decides when something happens. Sends and receives that stand next to each other in a program
start together, as torch.distributed.pipelining starts them (and as NCCL needs it). With sends that
do not wait (`OverlapSettings.send`) the program says nothing of receives: as many of them are
posted ahead, in either direction, as the stage keeps microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hetplan.cost.replay.programs import (
    DOWN,
    Message,
    Receive,
    Row,
    Send,
    Step,
    Wait,
    programs,
)
from hetplan.errors import InputError
from hetplan.plans.plan import Pipeline
from hetplan.plans.v_schedules import Pass
from hetplan.runtime.activity import Activity
from hetplan.runtime.messages import Messages


def program_of(pipeline: Pipeline, position: int, *, sends_wait: bool) -> tuple[Step, ...]:
    """What one stage of a pipeline does in a step."""
    stages, schedule = pipeline.stages, pipeline.schedule
    program = programs(
        schedule.name,
        len(stages),
        pipeline.num_microbatches,
        schedule.virtual_stages,
        [stage.warmup_depth for stage in stages] if schedule.name == "1f1b" else None,
        sends_wait,
    )[position]
    if sends_wait or len(stages) == 1:
        return program
    return tuple(_posted_ahead(program, stages[position].warmup_depth))


def _posted_ahead(program: Sequence[Step], depth: int) -> Iterator[Step]:
    """The program with receives: the first `depth` of each direction, then one as one arrives."""
    awaited: tuple[list[Message], list[Message]] = ([], [])
    for step in program:
        if isinstance(step, Wait):
            for message in step.received:
                awaited[message[0]].append(message)
    for messages in awaited:
        yield from map(Receive, messages[:depth])
    next_one = [iter(messages[depth:]) for messages in awaited]
    for step in program:
        yield step
        if isinstance(step, Wait):
            for direction, _, _ in step.received:
                yield from map(Receive, (m for m in [next(next_one[direction], None)] if m))


def _pass_name(one: Pass, chunks: int) -> str:
    name = "forward" if one.kind == "F" else "backward"
    chunk = f", chunk {one.chunk}" if chunks > 1 else ""
    return f"{name} pass of microbatch {one.microbatch}{chunk}"


def _message_name(message: Message) -> str:
    direction, _, microbatch = message
    return f"the {'activations' if direction == DOWN else 'gradients'} of microbatch {microbatch}"


class Passes:
    """One rank's passes and messages."""

    def __init__(
        self,
        program: Sequence[Step],
        modules: Sequence[nn.Module],
        messages: Messages | None,
        *,
        position: int,
        num_stages: int,
        microbatch_size: int,
        share: float,
        mark: Callable[[], None],
        activity: Activity,
    ) -> None:
        """`modules`: one per chunk. `share`: part of a microbatch's mean loss in the mean over the
        global batch. `mark` is called at the begin and the end of every pass. `activity` records
        every pass and every wait.
        """
        self._activity = activity
        self._program, self._modules, self._messages = program, modules, messages
        self._position, self._num_stages = position, num_stages
        self._row = Row("interleaved-1f1b", num_stages, len(modules))
        self._microbatch_size, self._share, self._mark = microbatch_size, share, mark
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._inputs: dict[Message, Tensor] = {}
        self._outputs: dict[Message, Tensor] = {}

    def run(self, tokens: Tensor | None, targets: Tensor | None) -> list[Tensor]:
        """One step; the losses of this rank's microbatches, each times `share`."""
        size, losses = self._microbatch_size, list[Tensor]()
        inputs = torch.split(tokens, size) if tokens is not None else ()
        wanted = torch.split(targets, size) if targets is not None else ()
        for step in self._program:
            if isinstance(step, Pass):
                self._start()
                self._mark()
                self._activity.begin(_pass_name(step, len(self._modules)))
                if step.kind == "F":
                    self._forward(step, inputs, wanted, losses)
                else:
                    self._backward(step)
                self._mark()
            else:
                self._talk(step)
        self._start()
        if self._messages is not None:
            for message in self._messages.leaving:
                self._wait_sent(self._messages, message)
        return losses

    def _start(self) -> None:
        if self._messages is not None:
            self._messages.start()

    def _talk(self, step: Send | Receive | Wait) -> None:
        messages = self._messages
        if messages is None:
            return
        if isinstance(step, Send):
            messages.send(step.message, self._outputs.pop(step.message))
        elif isinstance(step, Receive):
            messages.receive(step.message)
        else:
            messages.start()
            for message in step.sent:
                self._wait_sent(messages, message)
            for message in step.received:
                peers = messages.senders(message)
                if peers:
                    self._activity.begin(f"receive of {_message_name(message)}", peers)
                self._inputs[message] = messages.wait_received(message)

    def _wait_sent(self, messages: Messages, message: Message) -> None:
        peers = messages.receivers(message)
        if peers:
            self._activity.begin(f"send of {_message_name(message)}", peers)
        messages.wait_sent(message)

    def _virtual(self, one: Pass) -> tuple[int, int]:
        """Virtual stage of a pass, and their number."""
        chunks = len(self._modules)
        return one.chunk * self._num_stages + self._position, chunks * self._num_stages

    def _forward(
        self,
        one: Pass,
        tokens: Sequence[Tensor],
        targets: Sequence[Tensor],
        losses: list[Tensor],
    ) -> None:
        at, count = self._virtual(one)
        source = self._row.needed(one, self._position)
        if source is not None:
            x = self._inputs.pop(source).requires_grad_()
        elif at == 0:
            x = tokens[one.microbatch]
        else:
            raise InputError("a pipeline of one stage has no virtual stages")
        module = self._modules[one.chunk]
        if at == count - 1:
            output = module(x, targets[one.microbatch]) * self._share
            losses.append(output.detach())
        else:
            output = module(x)
        self._kept[one.chunk, one.microbatch] = (x, output)
        goal = self._row.made(one, self._position)
        if goal is not None:
            self._outputs[goal] = output.detach()

    def _backward(self, one: Pass) -> None:
        x, output = self._kept.pop((one.chunk, one.microbatch))
        source = self._row.needed(one, self._position)
        gradient = self._inputs.pop(source) if source is not None else None
        torch.autograd.backward(output, gradient)
        goal = self._row.made(one, self._position)
        if goal is not None:
            if x.grad is None:
                raise InputError("a stage's input has no gradient")
            self._outputs[goal] = x.grad
