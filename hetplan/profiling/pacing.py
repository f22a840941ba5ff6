"""How a CPU core is made to take the time of another device, layer by layer, on purpose.

A paced layer really computes, forward and backward, and then sleeps until a nominal time has
passed since it began. Other work on the machine is absorbed as long as the real time is below the
nominal one; where it is not, the pass counts as an overrun, and a run with many overruns is not
worth comparing. What the operating system sleeps too long is carried over as debt and taken off
the next passes. Time spent in the layer's tensor-parallel group is added to the nominal time, as
it is on a real device.

A pace proves the pipeline, the communication and the search; the times it makes are as regular as
it makes them, so it says nothing about how well noisy times are predicted, unless the pace itself
says that they scatter (`PacedKind.jitter`).

File: schema `hetplan.pace/2`, fields as in `Pace`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.model.spec import TRAINED_KINDS, LayerKind
from hetplan.profiling.layers import Communication
from hetplan.profiling.samples import Phase

SCHEMA = "hetplan.pace/2"

# One pass gives back at most half of its nominal time, so that no pass becomes all computation
# and no debt outlives a scheduling hiccup (Linux at 250 Hz: 4 ms ticks, five of them).
DEBT_SHARE = 0.5
DEBT_LIMIT_SECONDS = 0.02
# A training step is a sum of passes, a sample the median of single ones: were a hiccup of 20 ms
# owed there, dozens of passes of 1 ms would each last half as long, and the median with them. Only
# what an ordinary sleep takes too long is owed (four times Linux's timer slack of 50 us).
SAMPLE_DEBT_LIMIT_SECONDS = 2e-4
MAX_JITTER = 0.3
"""A tenth of a pass's time is left after three deviations; of a third nothing would be."""
JITTER_DEVIATIONS = 3.0
"""Where the normal distribution is cut off."""
# Below this a sleep overshoots by more than it waits (timer slack of Linux: 50 us).
SLEEP_RESOLUTION_SECONDS = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceEntry:
    """Nominal time of one phase of one layer."""

    layer: str
    """A `LayerKind` value; `head` includes the loss where the two are one module."""
    phase: str
    """`forward` or `backward`."""
    microbatch_size: int
    tp: int
    seconds: float
    """What a pass takes, communication of the tensor-parallel group not counted."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise InputError(f"seconds is {self.seconds}; a pace entry needs a positive time")
        if self.layer not in TRAINED_KINDS:
            raise InputError(f"layer is {self.layer}; it is one of {', '.join(TRAINED_KINDS)}")
        if self.phase not in (Phase.FORWARD, Phase.BACKWARD):
            raise InputError(f"phase is {self.phase}; a pace has forward and backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedKind:
    """Nominal times of one device kind, for the layers of one model."""

    device: str
    """Device kind that is played."""
    slow_down: float
    """How many times slower than the unpaced device the entries were made; for the record."""
    entries: tuple[PaceEntry, ...]
    jitter: float = 0.0
    """Standard deviation of a pass's time, as a part of its nominal time: normal, cut off at three
    deviations. A device that scatters does so when it is profiled and when it trains."""
    seed: int = 0
    """Of the jitter; every stream of a seed (`Pacer`) is another sequence."""

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MAX_JITTER:
            raise InputError(f"jitter is {self.jitter}; it is 0 to {MAX_JITTER}")

    def seconds(self, layer: LayerKind, phase: Phase, microbatch_size: int, tp: int) -> float:
        """Nominal time of a pass; an InputError where the pace has none."""
        for entry in self.entries:
            if (entry.layer, entry.phase, entry.microbatch_size, entry.tp) == (
                layer,
                phase,
                microbatch_size,
                tp,
            ):
                return entry.seconds
        raise InputError(
            f"the pace of device kind {self.device} has no {phase} time for layer {layer}, "
            f"microbatch_size {microbatch_size}, tp {tp}; make the pace with this size "
            "(`hetplan emulate pace` takes --microbatch and --tp)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Nominal times of every device kind that is played."""

    kinds: tuple[PacedKind, ...]

    def kind(self, device: str) -> PacedKind:
        """The pace of this device kind; an InputError where there is none."""
        for kind in self.kinds:
            if kind.device == device:
                return kind
        have = ", ".join(kind.device for kind in self.kinds)
        raise InputError(f"the pace has no device kind {device}; it has {have}")

    def choose(self, device: str | None) -> PacedKind:
        """The pace of this device kind, or of the only one."""
        if device is not None:
            return self.kind(device)
        if len(self.kinds) != 1:
            names = ", ".join(kind.device for kind in self.kinds)
            raise InputError(f"the pace has the device kinds {names}; choose one with --kind")
        return self.kinds[0]


def load_pace(path: Path) -> Pace:
    """The pace of a file (YAML or JSON); InputError with line and field where it is wrong."""
    return decode(read_document(path), Pace, schema=SCHEMA)


def save_pace(pace: Pace, path: Path) -> None:
    """Write a pace that `load_pace` reads back."""
    write_atomically(path, encode(pace, schema=SCHEMA))


class Pacer:
    """Paces the layers of one rank; `passes` and `overruns` tell whether the pace was held.

    One Pacer per rank: debt is carried from layer to layer, up to `debt_limit_seconds`
    (`SAMPLE_DEBT_LIMIT_SECONDS` where single passes are measured). `stream` numbers the devices of
    one kind: each scatters by itself. Passes must run in one thread (torch runs the backward pass
    of a CPU in the caller's).
    """

    def __init__(
        self,
        kind: PacedKind,
        *,
        debt_limit_seconds: float = DEBT_LIMIT_SECONDS,
        stream: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.kind = kind
        self.passes = 0
        """Passes paced so far, forward and backward."""
        self.overruns = 0
        """Passes whose real work took longer than the nominal time."""
        self._clock, self._sleep = clock, sleep
        self._debt_limit, self._debt = debt_limit_seconds, 0.0
        self._open_backward: _Paced | None = None
        # Devices of one kind do not scatter in step: each has a sequence of its own.
        self._random = random.Random(f"{kind.seed} {kind.device} {stream}")

    def wrap(self, module: nn.Module, layer: LayerKind, microbatch_size: int, tp: int) -> nn.Module:
        """A module that does what `module` does, in the nominal time of this layer.

        The wrapped module takes the layer's input first and further arguments after it. Under
        activation recomputation, wrap first and checkpoint the wrapped module: the second forward
        pass is paced like the first.
        """
        forward = self.kind.seconds(layer, Phase.FORWARD, microbatch_size, tp)
        backward = self.kind.seconds(layer, Phase.BACKWARD, microbatch_size, tp)
        return _Paced(self, module, forward, backward)

    def reset(self) -> None:
        """Forget counters and debt, as between warm-up and measured steps."""
        self.passes = self.overruns = 0
        self._debt = 0.0

    def _jittered(self, nominal_seconds: float) -> float:
        """What this pass takes of the nominal time."""
        if not self.kind.jitter:
            return nominal_seconds
        deviations = max(-JITTER_DEVIATIONS, min(JITTER_DEVIATIONS, self._random.gauss(0.0, 1.0)))
        return nominal_seconds * (1.0 + self.kind.jitter * deviations)

    def _wait(self, started: float, nominal_seconds: float, talked_seconds: float) -> None:
        """Sleep until the nominal time has passed since `started`, less what is owed.

        Time in the layer's tensor-parallel group comes on top: it does not scatter.
        """
        nominal_seconds = self._jittered(nominal_seconds) + talked_seconds
        repaid = min(self._debt, DEBT_SHARE * nominal_seconds)
        end = started + nominal_seconds - repaid
        self.passes += 1
        # Against the whole nominal time: what an earlier sleep took too long is not this pass's.
        if self._clock() > started + nominal_seconds:
            self.overruns += 1
        while (left := end - self._clock()) > SLEEP_RESOLUTION_SECONDS:
            self._sleep(left)
        late = self._clock() - end
        self._debt = min(self._debt_limit, max(0.0, self._debt - repaid + late))


class _Paced(nn.Module):
    """A layer between an Enter and an Exit that tell when its passes begin and end."""

    def __init__(
        self, pacer: Pacer, module: nn.Module, forward_seconds: float, backward_seconds: float
    ) -> None:
        super().__init__()
        self.module = module
        self.pacer = pacer
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self._begun = self._talked = 0.0
        self._backward_begun = self._backward_talked = 0.0
        self._recomputes = False
        self._gradients_left = 0
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._gradient_done)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """The module's result, once the nominal time has passed."""
        entered: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
        result: Tensor = _Exit.apply(self.module(entered, *rest), self, x.requires_grad)  # type: ignore[no-untyped-call]
        return result

    def _talk_seconds(self) -> float:
        communication = getattr(self.module, "communication", None)
        return communication.seconds if isinstance(communication, Communication) else 0.0

    def begin_forward(self) -> None:
        """The forward pass begins; inside an open backward pass it is a recomputation."""
        self._begun, self._talked = self.pacer._clock(), self._talk_seconds()
        if self.pacer._open_backward is self:
            self._recomputes = True

    def end_forward(self) -> None:
        """The forward pass has computed; wait."""
        open_backward = self.pacer._open_backward
        if open_backward is self:
            # Its own backward pass waits for both: a checkpoint may stop a recomputation as soon
            # as it has what it needs, before it would get here.
            return
        talked = self._talk_seconds() - self._talked
        self.pacer._wait(self._begun, self.forward_seconds, talked)
        if open_backward is not None:
            # Another layer's recomputation inside this backward pass: that time is paced already.
            open_backward._backward_begun += self.pacer._clock() - self._begun

    def begin_backward(self, input_has_gradient: bool) -> None:
        """The backward pass begins."""
        self._backward_begun, self._backward_talked = self.pacer._clock(), self._talk_seconds()
        self._recomputes = False
        self.pacer._open_backward = self
        # An embedding's tokens have no gradient: its pass is over with the last weight's.
        self._gradients_left = (
            0
            if input_has_gradient
            else sum(parameter.requires_grad for parameter in self.module.parameters())
        )

    def end_backward(self) -> None:
        """The backward pass has computed; wait."""
        nominal = self.backward_seconds + (self.forward_seconds if self._recomputes else 0.0)
        talked = self._talk_seconds() - self._backward_talked
        self.pacer._open_backward = None
        self.pacer._wait(self._backward_begun, nominal, talked)

    def _gradient_done(self, parameter: Tensor) -> None:
        if self._gradients_left:
            self._gradients_left -= 1
            if not self._gradients_left:
                self.end_backward()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, paced: _Paced) -> Tensor:
        ctx.paced = paced
        paced.begin_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # The engine runs the nodes of a graph latest first and gradient accumulation before
        # anything else, so all of the layer's gradients are done here.
        ctx.paced.end_backward()
        return gradients[0], None


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, paced: _Paced, input_has_gradient: bool) -> Tensor:
        ctx.paced, ctx.input_has_gradient = paced, input_has_gradient
        paced.end_forward()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.paced.begin_backward(ctx.input_has_gradient)
        return gradients[0], None, None
