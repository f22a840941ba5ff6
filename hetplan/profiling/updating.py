"""How weights are updated: the parameters of a rank as one vector, and the rule.

All parameters of a rank and all their gradients lie one after the other in one vector each; the
layers' own parameters are views. So gradients are reduced in one message, and the update is one
pass over memory. Element for element it is what the rule does to each parameter alone.

In bfloat16 the rule works on a float32 copy of the weights, from which the weights are rounded
after each update; gradients are accumulated and reduced in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hetplan.job.spec import Optimizer

# Fixed, so that runs of different plans can be compared. AdamW: betas and weight decay of GPT-3
# and Llama (arXiv 2005.14165, appendix B; 2302.13971, section 2.3); epsilon is torch's own. The
# rate is five times the largest of those papers: this trainer's models are far smaller.
ADAMW_RATE = 3e-3
ADAMW_BETAS = (0.9, 0.95)
ADAMW_EPSILON = 1e-8
ADAMW_WEIGHT_DECAY = 0.1
SGD_RATE = 0.1
RULE_STATES = {Optimizer.ADAMW: ("exp_avg", "exp_avg_sq"), Optimizer.SGD: ()}
"""What each rule keeps of every element, by torch's names."""


def make_rule(optimizer: Optimizer, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The job's update rule; plain SGD without momentum. No parameter is exempt from decay."""
    if optimizer is Optimizer.ADAMW:
        return torch.optim.AdamW(
            parameters,
            lr=ADAMW_RATE,
            betas=ADAMW_BETAS,
            eps=ADAMW_EPSILON,
            weight_decay=ADAMW_WEIGHT_DECAY,
        )
    return torch.optim.SGD(parameters, lr=SGD_RATE)


def rule_state(rule: torch.optim.Optimizer, vector: Tensor) -> dict[str, Tensor]:
    """What the rule keeps of this vector's elements, by torch's names; zeros before any update.

    What is written into these tensors is the rule's state from then on.
    """
    kept = rule.state[vector]
    if isinstance(rule, torch.optim.AdamW) and not kept:
        # As torch makes them at the first update.
        kept["step"] = torch.tensor(0.0)
        kept["exp_avg"] = torch.zeros_like(vector)
        kept["exp_avg_sq"] = torch.zeros_like(vector)
    return {name: kept[name] for name in RULE_STATES[optimizer_of(rule)]}


def set_updates(rule: torch.optim.Optimizer, vector: Tensor, updates: int) -> None:
    """Let the rule go on as after this many updates, which its bias correction depends on."""
    if rule_state(rule, vector):
        rule.state[vector]["step"].fill_(updates)


def optimizer_of(rule: torch.optim.Optimizer) -> Optimizer:
    """The job's word for a rule of `make_rule`."""
    return Optimizer.ADAMW if isinstance(rule, torch.optim.AdamW) else Optimizer.SGD


class FlatParameters:
    """The parameters of a module as views into one vector, with the rule that updates it."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        parameters = list(module.parameters())
        like = parameters[0]
        total = sum(parameter.numel() for parameter in parameters)
        self.weights = torch.empty(total, dtype=like.dtype, device=like.device)
        self.gradients = torch.zeros_like(self.weights)
        """Sum of all microbatches' gradients since `clear`."""
        at = 0
        for parameter in parameters:
            stop = at + parameter.numel()
            view = self.weights[at:stop].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            # Autograd adds into a gradient that is already there.
            parameter.grad = self.gradients[at:stop].view(parameter.shape)
            at = stop
        exact = self.weights.dtype == torch.float32
        self._updated = nn.Parameter(self.weights if exact else self.weights.float())
        self._updated.grad = self.gradients if exact else torch.empty_like(self._updated)
        self._rule = make_rule(optimizer, [self._updated])

    @property
    def updated(self) -> Tensor:
        """The vector that the rule updates: the weights, or their float32 copy."""
        return self._updated

    def state(self) -> dict[str, Tensor]:
        """The rule's state of `updated` (`rule_state`)."""
        return rule_state(self._rule, self._updated)

    def resume(self, updates: int) -> None:
        """Go on as after this many updates with what `updated` and `state` have now."""
        set_updates(self._rule, self._updated, updates)
        if self._updated.data_ptr() != self.weights.data_ptr():
            self.weights.copy_(self._updated.detach())

    def clear(self) -> None:
        """Set all gradients to zero, before the first microbatch of a step."""
        self.gradients.zero_()

    def update(self) -> None:
        """Apply the rule once."""
        exact = self._updated.data_ptr() == self.weights.data_ptr()
        if not exact and self._updated.grad is not None:
            self._updated.grad.copy_(self.gradients)
        self._rule.step()
        if not exact:
            self.weights.copy_(self._updated.detach())
