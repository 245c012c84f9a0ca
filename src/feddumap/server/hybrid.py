"""Hybrid-FL: the server trains like a device and joins the average."""

from collections.abc import Iterable
from itertools import chain

from feddumap.algorithm import Metrics, RoundView
from feddumap.server.dynamic_update import train_copy
from feddumap.tensors import weighted_mean
from feddumap.types import Tensors, Upload


def with_server(uploads: Iterable[Upload], view: RoundView) -> tuple[Tensors, Metrics]:
    """w = (Σ n_k w_k + n0 w_0) / (Σ n_k + n0), where w_0 is the server's model after E epochs from w."""
    devices = ((upload.samples, upload.weights) for upload in uploads)
    server = view.context.server
    # the server's turn comes when all devices have answered: its model is made only then
    own = ((len(server), train_copy(view.state.weights, server, view)) for _ in range(1))
    return weighted_mean(chain(devices, own)), {}
