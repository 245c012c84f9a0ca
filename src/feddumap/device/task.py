"""A device's work order: what it was sent, what it holds, and how it is to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from feddumap.config import Config
from feddumap.core.algorithm import Plan
from feddumap.core.messages import Broadcast, Tensors, Upload
from feddumap.core.rng import stream
from feddumap.core.tensors import same_form
from feddumap.device.holdings import Holdings
from feddumap.errors import FeddumapError
from feddumap.models.cost import parameter_names
from feddumap.training.backends import make_model
from feddumap.training.model import Model
from feddumap.training.optimizers import GradientHook, UpdateRule, masked, with_gradient_hook
from feddumap.training.samples import Batch, Samples, batches, label_shift


@dataclass(frozen=True)
class Task:
    """One device's part in one round.

    `memory` is what it kept when it last took part, nothing at first; what `local` puts into `kept` is its
    memory from now on. Neither is ever sent. `watch` is shown the gradients of its training.
    """

    device: int
    broadcast: Broadcast
    holdings: Holdings
    config: Config
    memory: Tensors = field(default_factory=dict)
    kept: Tensors = field(default_factory=dict)
    watch: GradientHook | None = None

    def model(self) -> Model:
        """The network received, ready to train."""
        shape, weights = self.broadcast.architecture, self.broadcast.weights
        return make_model(shape, weights, self.config.train.kernels, self.config.run.device)

    def rng(self, purpose: str) -> np.random.Generator:
        """This device's random stream for a purpose in this round."""
        return stream(self.config.run.seed, purpose, self.broadcast.round, self.device)

    def plan(
        self, model: Model, samples: Samples, rule: UpdateRule, report: Callable[[int], Upload] | None = None
    ) -> Plan:
        """Train E epochs over `samples` at this round's learning rate, inside the mask. Then the model is
        what goes up, unless `report` makes something else of it."""
        inside = masked(rule, self.broadcast.mask)
        seen = with_gradient_hook(inside, self.watch) if self.watch else inside
        return Plan(model, self.batches(samples), seen, report or partial(self.upload, model, samples))

    def batches(self, samples: Samples) -> Iterator[Batch]:
        """E epochs over `samples` in this round's order."""
        train = self.config.train
        placed = samples.to(self.config.run.device)
        rng, shift = self.rng("batches"), self.shift(placed)
        augment = self.broadcast.architecture.input if self.config.data.augment else None
        return batches(placed, train.epochs, train.batch, rng, augment=augment, shift=shift)

    def shift(self, samples: Samples) -> torch.Tensor | None:
        """What `train.calibration` adds to the outputs while the device trains on `samples`."""
        return label_shift(
            samples.targets, self.broadcast.architecture.classes, self.config.train.calibration
        )

    def received(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors that came along under a prefix, by parameter name."""
        extra = self.broadcast.extra
        return {name.removeprefix(prefix): t for name, t in extra.items() if name.startswith(prefix)}

    def remembered(self, prefix: str) -> dict[str, torch.Tensor]:
        """What it kept under a prefix, by parameter name: nothing at first, then a tensor for each. A memory
        of another form is an error."""
        kept = {name.removeprefix(prefix): t for name, t in self.memory.items() if name.startswith(prefix)}
        names = parameter_names(self.broadcast.architecture)
        if kept and not same_form(kept, {name: self.broadcast.weights[name] for name in names}):
            raise FeddumapError(
                f"the memory of device {self.device} does not fit the model of round {self.broadcast.round}: "
                "it is of another run; start anew"
            )
        return kept

    def upload(self, trained: Model, samples: Samples, steps: int) -> Upload:
        """The trained model as it goes back, in the names and shapes it came in."""
        return Upload(self.device, self.broadcast.round, len(samples), steps, trained.weights())
