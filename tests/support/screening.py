"""Uploads of small vectors and the rules that screen them, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from feddumap.config import Config
from feddumap.core.algorithm import Merged, RoundView, mean_of_uploads
from feddumap.core.messages import Tensors, Upload
from feddumap.screening import RULES
from feddumap.screening.rule import Rule

START: Tensors = {
    "fc.weight": torch.linspace(-1, 1, 6).view(2, 3),
    "bn.running_mean": torch.tensor([0.5, 0.25]),
    "bn.count": torch.tensor(7),
}
SIZE = 8
"""Floats of a model."""


def upload(device: int, update: Sequence[float], samples: int = 10, extra: Sequence[float] = ()) -> Upload:
    """The upload whose update, over all float tensors of START, is `update`."""
    moved = torch.tensor(np.asarray(update), dtype=torch.float64)
    weights = {
        "fc.weight": (START["fc.weight"].double() + moved[:6].view(2, 3)).float(),
        "bn.running_mean": (START["bn.running_mean"].double() + moved[6:8]).float(),
        "bn.count": torch.tensor(10 + device),
    }
    other = {"c/fc.weight": torch.tensor(extra, dtype=torch.float32).view(2, 3)} if len(extra) else {}
    return Upload(device, 0, samples, 1, weights, other)


def rule(name: str, tensors: Tensors | None = None, **settings: Any) -> Rule:
    """A rule of [aggregate] at the start of a round."""
    config = Config.parse({"aggregate": {"name": name, **settings}})
    context: Any = SimpleNamespace(config=config)
    state: Any = SimpleNamespace(weights=START, round=0)
    view = RoundView(context, state, 0.1, [])
    return RULES[name](tensors or {}, view)


def merged(screening: Rule, uploads: Sequence[Upload]) -> Merged:
    """What the ordinary aggregation makes of uploads under a rule."""
    view = RoundView(screening.view.context, screening.view.state, 0.1, [], combine=screening.combine)
    return mean_of_uploads(screening.admit(iter(uploads)), view)


def updates(tensors: Tensors) -> np.ndarray:
    """The update of a model in float64, flat."""
    floats = [name for name in START if START[name].is_floating_point()]
    return np.concatenate(
        [(tensors[name].double() - START[name].double()).numpy().reshape(-1) for name in floats]
    )
