"""How a gradient moves the parameters: SGD, kinds of momentum, Adam, and what goes around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

Group = list[torch.Tensor]
"""Numbers for every parameter: a tensor for each, or one flat tensor for all."""
Watch = Callable[[dict[str, torch.Tensor]], None]
"""Sees the gradients of a step, by parameter name. What it keeps it must copy."""


class Space(Protocol):
    """The form in which a model's parameters are updated."""

    @property
    def names(self) -> list[str]:
        """The parameters' names, in order."""
        ...

    def start(self) -> Group:
        """A copy of the parameters as they are now."""
        ...

    def zeros(self) -> Group:
        """A zero for every parameter."""
        ...

    def filled(self, values: Mapping[str, torch.Tensor]) -> Group:
        """Copies of the values of each parameter, by name."""
        ...

    def named(self, group: Group) -> dict[str, torch.Tensor]:
        """Views of a group, by parameter name and in the parameters' shapes."""
        ...


@dataclass(frozen=True)
class UpdateRule:
    """How a gradient moves the parameters: `init` makes a rule's own state, `step` updates in place."""

    init: Callable[[Space], Group]
    step: Callable[[Group, Group, Group, float], None]


def sgd() -> UpdateRule:
    """w ← w − η g."""

    def step(parameters: Group, grads: Group, _: Group, lr: float) -> None:
        torch._foreach_add_(parameters, grads, alpha=-lr)

    return UpdateRule(init=lambda _: [], step=step)


def momentum(beta: float) -> UpdateRule:
    """m ← β m + (1 − β) g, w ← w − η m, from m = 0. (torch.optim.SGD's dampening skips its first step.)"""

    def step(parameters: Group, grads: Group, state: Group, lr: float) -> None:
        torch._foreach_mul_(state, beta)
        torch._foreach_add_(state, grads, alpha=1 - beta)
        torch._foreach_add_(parameters, state, alpha=-lr)

    return UpdateRule(lambda space: space.zeros(), step)


def carried_momentum(beta: float, carried: dict[str, torch.Tensor]) -> UpdateRule:
    """The same from a given m, by parameter name. `carried` is updated in place and holds m afterwards."""

    def init(space: Space) -> Group:
        state = space.filled(carried)
        carried.update(space.named(state))
        return state

    return replace(momentum(beta), init=init)


def frozen_momentum(beta: float, state: dict[str, torch.Tensor]) -> UpdateRule:
    """w ← w − η ((1 − β) g + β s) with the server's s, which stays as it is (MimeLite)."""

    def step(parameters: Group, grads: Group, frozen: Group, lr: float) -> None:
        torch._foreach_add_(parameters, grads, alpha=-lr * (1 - beta))
        torch._foreach_add_(parameters, frozen, alpha=-lr * beta)

    return UpdateRule(lambda space: space.filled(state), step)


def proximal(mu: float) -> UpdateRule:
    """w ← w − η (g + μ (w − w⁰)): FedProx, SGD on ℓ(w) + μ/2 ‖w − w⁰‖² with w⁰ the model received."""

    def step(parameters: Group, grads: Group, start: Group, lr: float) -> None:
        torch._foreach_add_(grads, torch._foreach_sub(parameters, start), alpha=mu)
        torch._foreach_add_(parameters, grads, alpha=-lr)

    return UpdateRule(lambda space: space.start(), step)


def corrected(shift: dict[str, torch.Tensor]) -> UpdateRule:
    """w ← w − η (g + s) with a given s: SCAFFOLD, whose s is c − c_k."""

    def step(parameters: Group, grads: Group, state: Group, lr: float) -> None:
        torch._foreach_add_(grads, state)
        torch._foreach_add_(parameters, grads, alpha=-lr)

    return UpdateRule(lambda space: space.filled(shift), step)


def masked(rule: UpdateRule, mask: dict[str, torch.Tensor]) -> UpdateRule:
    """A rule under which the weights that a mask leaves out get no gradient, and so stay zero."""
    if not mask:
        return rule

    def init(space: Space) -> Group:
        one = torch.ones(())
        kept = space.filled({name: mask.get(name, one) for name in space.names})
        return kept + rule.init(space)

    def step(parameters: Group, grads: Group, state: Group, lr: float) -> None:
        count = len(parameters)
        torch._foreach_mul_(grads, state[:count])
        rule.step(parameters, grads, state[count:], lr)

    return UpdateRule(init, step)


def watched(rule: UpdateRule, see: Watch) -> UpdateRule:
    """A rule that shows each step's gradients first, by parameter name."""
    spaces: list[Space] = []

    def init(space: Space) -> Group:
        spaces[:] = [space]
        return rule.init(space)

    def step(parameters: Group, grads: Group, state: Group, lr: float) -> None:
        see(spaces[0].named(grads))
        rule.step(parameters, grads, state, lr)

    return UpdateRule(init, step)


def adam(
    clip: float = math.inf,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> UpdateRule:
    """Adam with bias correction, on gradients whose joint norm is clipped; decay adds λ w to them."""

    def init(space: Space) -> Group:
        return [torch.zeros(()), *space.zeros(), *space.zeros()]

    def step(parameters: Group, grads: Group, state: Group, lr: float) -> None:
        count, half = state[0].add_(1).item(), len(parameters) + 1
        means, squares = state[1:half], state[half:]
        if clip < math.inf:
            norm = torch.stack(torch._foreach_norm(grads)).norm().item()
            if norm > clip:
                torch._foreach_mul_(grads, clip / norm)
        if weight_decay:
            torch._foreach_add_(grads, parameters, alpha=weight_decay)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2**count) ** 0.5)
        torch._foreach_add_(roots, epsilon)
        torch._foreach_addcdiv_(parameters, means, roots, -lr / (1 - beta1**count))

    return UpdateRule(init, step)
