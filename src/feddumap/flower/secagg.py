"""Secure aggregation by Flower's SecAgg+ workflow: the server gets the weighted mean of updates and no single
one. The only module that uses these parts of Flower.

A round has four messages to each device: keys, shares of keys, training, unmasking. The device's side of all
four is Flower's `secaggplus_mod`, the server's `SecAggPlusWorkflow`; this module puts our message to train in
the third, and has the device give its update (its weights minus the broadcast's) to the mod instead of
sending it. The update is clipped to a range, quantized and masked; the sum of all masks is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid

from feddumap.core.messages import Broadcast, Tensors, Upload
from feddumap.core.rng import stream
from feddumap.errors import FeddumapError
from feddumap.flower.requests import Request

CLIPPING_RANGE = 8.0  # the largest change of a weight, in a round; Flower's default, as the next two
QUANTIZATION_RANGE, MODULUS_RANGE = 1 << 22, 1 << 32
STEP = 2 * CLIPPING_RANGE / QUANTIZATION_RANGE  # of the quantization
SHARES, THRESHOLD = 1.0, 2 / 3  # every device gets a share of each key, and two thirds of them restore it


# device side


def masked_reply(
    message: Message, context: Context, train: Callable[[RecordDict], tuple[Upload, Broadcast, Request]]
) -> Message:
    """A device's reply in any stage of the protocol; `train` is called in the stage that needs it."""

    def call_next(asked: Message, _: Context) -> Message:
        upload, broadcast, request = train(asked.content)
        update = ndarrays_to_parameters(_update(upload, broadcast))
        result = FitRes(Status(Code.OK, ""), update, upload.samples, {"steps": upload.steps})
        start = stream(request.config.run.seed, "secagg", upload.round, upload.device).integers(2**32)
        np.random.set_state(np.random.RandomState(int(start)).get_state())
        return Message(fitres_to_recorddict(result, keep_input=False), reply_to=asked)

    before = np.random.get_state()  # Flower rounds at random, by numpy's global generator
    try:
        return secaggplus_mod(message, context, call_next)
    finally:
        np.random.set_state(before)


def _update(upload: Upload, broadcast: Broadcast) -> list[np.ndarray]:
    """The change of each tensor, in the order of their names."""
    if upload.extra:
        raise FeddumapError("its upload has other tensors besides the model, which would not be masked")
    found = []
    for name in sorted(upload.weights):
        change = upload.weights[name].double() - broadcast.weights[name].double()
        if not bool((change.abs() <= CLIPPING_RANGE).all()):
            raise FeddumapError(f"its {name} changed by more than {CLIPPING_RANGE:g}, or is not finite")
        found.append(change.numpy())
    return found


# server side


@dataclass
class Aggregated:
    """What the protocol told: the mean update in the order of names, and the samples and steps of each node
    that it is of. None if it was halted."""

    update: list[np.ndarray] | None = None
    samples: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)


class _Strategy:
    """What the workflow asks of a Flower strategy: the nodes to train, and a place for the result."""

    def __init__(self, nodes: list[int]) -> None:
        self._nodes = nodes
        self.found = Aggregated()

    def configure_fit(self, *_: object) -> list[tuple[Any, FitIns]]:
        return [(SimpleNamespace(node_id=node), FitIns(Parameters([], ""), {})) for node in self._nodes]

    def aggregate_fit(
        self, _: int, results: list[tuple[Any, FitRes]], __: object
    ) -> tuple[None, dict[str, Any]]:
        for proxy, result in results:  # Flower has put the mean in the place of each
            self.found.samples[proxy.node_id] = result.num_examples
            self.found.steps[proxy.node_id] = int(result.metrics.get("steps", 0))
            self.found.update = parameters_to_ndarrays(result.parameters)
        return None, {}


class _Workflow(SecAggPlusWorkflow):
    """Flower's workflow, with our messages where it has a strategy's."""

    def __init__(self, contents: Mapping[int, RecordDict], most_samples: int, timeout: float) -> None:
        super().__init__(
            SHARES,
            THRESHOLD,
            max_weight=float(most_samples),
            clipping_range=CLIPPING_RANGE,
            quantization_range=QUANTIZATION_RANGE,
            modulus_range=MODULUS_RANGE,
            timeout=timeout,
        )
        self._contents = contents

    def setup_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        going_on: bool = super().setup_stage(grid, context, state)
        state.nid_to_fitins = dict(self._contents)
        return going_on


def aggregate(
    grid: Grid, number: int, contents: Mapping[int, RecordDict], most_samples: int, timeout: float
) -> Aggregated:
    """Carry out round `number` of the protocol with messages to train, by node. `most_samples` is the largest
    number of samples of a device."""
    strategy = _Strategy(list(contents))
    state = RecordDict(
        {
            MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: number}),
            MAIN_PARAMS_RECORD: ArrayRecord(),
        }
    )
    context = LegacyContext(Context(0, 0, {}, state, {}), strategy=cast("Any", strategy))
    try:
        _Workflow(contents, most_samples, timeout)(grid, context)
    except (ValueError, TypeError, KeyError, IndexError) as error:  # a reply that Flower cannot use
        said = " ".join(str(error).split())[:300]
        raise FeddumapError(
            f"round {number}: secure aggregation failed ({type(error).__name__}: {said}): a device sent what "
            "cannot be used, and which one cannot be told; resume to try again"
        ) from None
    return strategy.found


def updated(before: Tensors, update: list[np.ndarray]) -> Tensors:
    """The broadcast's weights after the mean update; an error if it does not have their form."""
    names = sorted(before)
    shapes = [tuple(before[name].shape) for name in names]
    if [each.shape for each in update] != shapes or not all(np.isfinite(each).all() for each in update):
        raise FeddumapError("the sum of the devices' updates is not of the model's form: resume to try again")
    changed = dict(zip(names, update, strict=True))
    return {
        name: (tensor.double() + torch.from_numpy(changed[name])).to(tensor.dtype)
        for name, tensor in before.items()
    }
