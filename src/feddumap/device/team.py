"""Devices of a round that train side by side in one process: together, where that can be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from feddumap.algorithm import Plan
from feddumap.device.stack import Stack, stackable
from feddumap.device.task import Task
from feddumap.device.training import Batch, Group, Rule, descend, fit
from feddumap.models import build
from feddumap.models.cost import macs
from feddumap.types import Architecture, Upload

Order = tuple[nn.Module, Iterable[Batch], Rule]


SMALL = 1_000_000  # multiply-adds an image
LARGEST = 5


def stack_size(architecture: Architecture, cohort: int) -> int:
    """How many devices train as one: several in small chains, where a step is mostly overhead, and so few
    that two processes have something to do. It is part of the run's configuration: bits depend on it."""
    small = macs(architecture) <= SMALL and stackable(build(architecture))
    return max(1, min(LARGEST, cohort // 2)) if small else 1


def carry_out(tasks: Sequence[Task], plans: Sequence[Plan]) -> list[Upload]:
    """Train as the devices' plans say, and let each report."""
    steps = [0] * len(plans)
    for team in teams(plans):
        orders = [order(tasks[i], plans[i]) for i in team]
        lr = tasks[team[0]].broadcast.lr
        taken = fit_together(orders, lr) if len(team) > 1 else fit(*orders[0], lr)
        for i in team:
            steps[i] = taken
    return [plan.report(taken) for plan, taken in zip(plans, steps, strict=True)]


def teams(plans: Sequence[Plan]) -> list[list[int]]:
    """The places of plans whose networks take their steps as one: small chains, rules that go together and
    equally many samples. The others with a network are alone; without one there is nothing to train."""
    found: dict[object, list[int]] = {}
    for i, plan in enumerate(plans):
        if plan.network is None or plan.rule is None or plan.samples is None:
            continue
        together = len(plans) > 1 and plan.rule.together and stackable(plan.network)
        found.setdefault(len(plan.samples) if together else f"alone {i}", []).append(i)
    return list(found.values())


def order(task: Task, plan: Plan) -> Order:
    assert plan.network is not None
    assert plan.samples is not None
    assert plan.rule is not None
    return plan.network, task.batches(plan.samples), plan.rule


def fit_together(orders: Sequence[Order], lr: float) -> int:
    """Train equal networks in place, each on its own batches, as one `Stack`; returns the steps of each.

    Equal to training them one by one but for rounding. Their rules differ in their states only.
    """
    stack = Stack([network for network, _, _ in orders])
    named = [dict(network.named_parameters()) for network, _, _ in orders]
    rules = [rule for _, _, rule in orders]
    states = [rule.init(own) for rule, own in zip(rules, named, strict=True)]
    count = len(named[0])
    parts = [slice(i, i + count) for i in range(0, len(states[0]), count)]
    state = [tensor for part in parts for tensor in stack.gather([own[part] for own in states])]

    def gradients(batch: tuple[Batch, ...]) -> Group:
        return stack.gradients([inputs for inputs, _ in batch], [targets for _, targets in batch])

    data = zip(*(batches for _, batches, _ in orders), strict=True)
    steps = descend(data, gradients, stack.parameters, rules[0], state, lr)
    with torch.no_grad():
        stack.scatter(stack.parameters, [list(own.values()) for own in named])
        for part in parts:
            stack.scatter(state[part], [own[part] for own in states])
    return steps
