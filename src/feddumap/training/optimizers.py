"""Update rules: SGD, variants of momentum, Adam, and wrappers around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

TensorList = list[torch.Tensor]
"""Values of all parameters: a tensor for each, or one flat tensor for all."""
GradientHook = Callable[[dict[str, torch.Tensor]], None]
"""Called with the gradients of a step by parameter name, which it must copy to keep them."""


class ParameterSpace(Protocol):
    """The representation in which a model's parameters are updated."""

    @property
    def names(self) -> list[str]:
        """The parameters' names, in order."""
        ...

    def start(self) -> TensorList:
        """A copy of the current parameters."""
        ...

    def zeros(self) -> TensorList:
        """Zeros for all parameters."""
        ...

    def filled(self, values: Mapping[str, torch.Tensor]) -> TensorList:
        """Copies of values given by parameter name."""
        ...

    def named(self, group: TensorList) -> dict[str, torch.Tensor]:
        """Views by parameter name, in the shapes of the parameters."""
        ...


@dataclass(frozen=True)
class UpdateRule:
    """`init` makes the state of the rule; `step(parameters, grads, state, lr)` updates parameters and state
    in place, and may overwrite the gradients."""

    init: Callable[[ParameterSpace], TensorList]
    step: Callable[[TensorList, TensorList, TensorList, float], None]


def sgd() -> UpdateRule:
    """w ← w − η g."""

    def step(parameters: TensorList, grads: TensorList, _: TensorList, lr: float) -> None:
        torch._foreach_add_(parameters, grads, alpha=-lr)

    return UpdateRule(init=lambda _: [], step=step)


def momentum(beta: float) -> UpdateRule:
    """m ← β m + (1 − β) g, w ← w − η m, from m = 0. (torch.optim.SGD skips dampening in the first step.)"""

    def step(parameters: TensorList, grads: TensorList, state: TensorList, lr: float) -> None:
        torch._foreach_mul_(state, beta)
        torch._foreach_add_(state, grads, alpha=1 - beta)
        torch._foreach_add_(parameters, state, alpha=-lr)

    return UpdateRule(lambda space: space.zeros(), step)


def momentum_from(beta: float, initial: dict[str, torch.Tensor]) -> UpdateRule:
    """`momentum` from a given m, by parameter name. `initial` is updated in place and holds m afterwards."""

    def init(space: ParameterSpace) -> TensorList:
        state = space.filled(initial)
        initial.update(space.named(state))
        return state

    return replace(momentum(beta), init=init)


def frozen_momentum(beta: float, state: dict[str, torch.Tensor]) -> UpdateRule:
    """w ← w − η ((1 − β) g + β s) with the server's s, which is constant (MimeLite)."""

    def step(parameters: TensorList, grads: TensorList, frozen: TensorList, lr: float) -> None:
        torch._foreach_add_(parameters, grads, alpha=-lr * (1 - beta))
        torch._foreach_add_(parameters, frozen, alpha=-lr * beta)

    return UpdateRule(lambda space: space.filled(state), step)


def proximal(mu: float) -> UpdateRule:
    """w ← w − η (g + μ (w − w⁰)): FedProx, SGD on ℓ(w) + μ/2 ‖w − w⁰‖² with w⁰ the model received."""

    def step(parameters: TensorList, grads: TensorList, start: TensorList, lr: float) -> None:
        torch._foreach_add_(grads, torch._foreach_sub(parameters, start), alpha=mu)
        torch._foreach_add_(parameters, grads, alpha=-lr)

    return UpdateRule(lambda space: space.start(), step)


def corrected(shift: dict[str, torch.Tensor]) -> UpdateRule:
    """w ← w − η (g + s) with a given s: SCAFFOLD, whose s is c − c_k."""

    def step(parameters: TensorList, grads: TensorList, state: TensorList, lr: float) -> None:
        torch._foreach_add_(grads, state)
        torch._foreach_add_(parameters, grads, alpha=-lr)

    return UpdateRule(lambda space: space.filled(shift), step)


def masked(rule: UpdateRule, mask: dict[str, torch.Tensor]) -> UpdateRule:
    """A rule that zeroes the gradients of masked weights, so that these weights remain zero."""
    if not mask:
        return rule

    def init(space: ParameterSpace) -> TensorList:
        one = torch.ones(())
        kept = space.filled({name: mask.get(name, one) for name in space.names})
        return kept + rule.init(space)

    def step(parameters: TensorList, grads: TensorList, state: TensorList, lr: float) -> None:
        count = len(parameters)
        torch._foreach_mul_(grads, state[:count])
        rule.step(parameters, grads, state[count:], lr)

    return UpdateRule(init, step)


def with_gradient_hook(rule: UpdateRule, hook: GradientHook) -> UpdateRule:
    """A rule that calls `hook` with the gradients before each step."""
    spaces: list[ParameterSpace] = []

    def init(space: ParameterSpace) -> TensorList:
        spaces[:] = [space]
        return rule.init(space)

    def step(parameters: TensorList, grads: TensorList, state: TensorList, lr: float) -> None:
        hook(spaces[0].named(grads))
        rule.step(parameters, grads, state, lr)

    return UpdateRule(init, step)


def adam(
    clip: float = math.inf,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> UpdateRule:
    """Adam with bias correction; the global gradient norm is clipped, then weight decay adds λ w."""

    def init(space: ParameterSpace) -> TensorList:
        return [torch.zeros(()), *space.zeros(), *space.zeros()]

    def step(parameters: TensorList, grads: TensorList, state: TensorList, lr: float) -> None:
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
