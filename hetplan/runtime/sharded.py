"""How the data-parallel ranks of a stage share the optimizer: each updates its part of the weights.

ZeRO-1 (arXiv 1910.02054): gradients are summed so that each rank of a sharding group gets the sum
of its part alone, it updates that part, and the updated weights are gathered. With several sharding
groups (arXiv 2205.00119) the parts are summed once more between the groups.

All weights of a rank are one vector; its parts are equally long, the last one is filled up with
zeros where the length is no multiple.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hetplan.cost.network.segments import TrafficClass
from hetplan.job.spec import Optimizer
from hetplan.profiling.updating import make_rule, rule_state, set_updates
from hetplan.runtime.communicator.channels import Channel


class Shard:
    """One rank's part of the weights of a stage, and the rule that updates it."""

    def __init__(
        self,
        weights: Tensor,
        gradients: Tensor,
        optimizer: Optimizer,
        *,
        inside: Channel,
        across: Channel | None,
        index: int,
    ) -> None:
        """`inside`: the ranks that split the vector, of which this one has part `index`;
        `across`: those of other groups with the same part.
        """
        self._weights, self._gradients = weights, gradients
        self._inside = inside
        total, self.parts = weights.numel(), len(inside.ranks)
        parts = self.parts
        size = -(-total // parts)
        self.start = min(total, index * size)
        """Of this rank's part in the vector."""
        stop = min(total, self.start + size)
        self._padded = weights.new_zeros(parts * size) if parts * size != total else None
        self.gradients = gradients.new_zeros(size)
        """Of this rank's part, after `reduce`."""
        self._across = (
            None if across is None else across.sum_of(self.gradients, TrafficClass.DATA_PARALLEL)
        )
        mine = weights[self.start : stop]
        exact = weights.dtype == torch.float32
        self._updated = nn.Parameter(mine if exact else mine.float())
        self._mine = mine
        self._rule = make_rule(optimizer, [self._updated])

    @property
    def updated(self) -> Tensor:
        """This part of the weights in float32, as the rule updates it."""
        return self._updated

    def state(self) -> dict[str, Tensor]:
        """The rule's state of `updated` (`hetplan.profiling.updating.rule_state`)."""
        return rule_state(self._rule, self._updated)

    def resume(self, updates: int) -> None:
        """Go on as after this many updates; the whole vector of weights is set already."""
        set_updates(self._rule, self._updated, updates)

    def counted(self, views: Iterable[Tensor]) -> Sequence[Tensor]:
        """What of these stretches of the gradient vector lies in this part, as views of it."""
        found = []
        for view in views:
            at = (view.data_ptr() - self._gradients.data_ptr()) // view.element_size()
            start = max(at, self.start)
            stop = min(at + view.numel(), self.start + self.gradients.numel())
            if start < stop:
                found.append(self.gradients[start - self.start : stop - self.start])
        return tuple(found)

    def expect(self) -> None:
        """Let what other groups send come in from now on: the earlier, the sooner it is there."""
        if self._across is not None:
            self._across.expect()

    def reduce(self) -> None:
        """Sum the gradients over all copies."""
        message = self._gradients
        if self._padded is not None:
            self._padded[: message.numel()].copy_(message)
            message = self._padded
        self._inside.scatter_sum(message, self.gradients)
        if self._across is not None:
            self._across.start().wait()

    def update(self) -> None:
        """Apply the rule to this part and gather all parts."""
        size = self._mine.numel()
        self._updated.grad = self.gradients[:size].to(self._updated.dtype)
        self._rule.step()
        if self._updated.data_ptr() != self._mine.data_ptr():
            self._mine.copy_(self._updated.detach())
        if self._padded is None:
            self._inside.gather(self._mine, self._weights)
            return
        filled = self._weights.new_zeros(self.gradients.numel())
        filled[:size].copy_(self._mine)
        self._inside.gather(filled, self._padded)
        self._weights.copy_(self._padded[: self._weights.numel()])
