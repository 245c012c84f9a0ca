"""Hybrid-FL: the server trains like a device and joins the average."""

from collections.abc import Iterable
from itertools import chain

from feddumap.core.algorithm import Merged, RoundView
from feddumap.core.messages import Upload
from feddumap.core.tensors import weighted_mean
from feddumap.methods.feddu import train_copy


def with_server(uploads: Iterable[Upload], view: RoundView) -> Merged:
    """w = (Σ n_k w_k + n0 w_0) / (Σ n_k + n0), where w_0 is the server's model after E epochs from w."""
    devices = ((upload.samples, upload.weights) for upload in uploads)
    server = view.context.server
    # the server's turn comes when all devices have answered: its model is made only then
    own = ((len(server), train_copy(view.state.weights, server, view)[0]) for _ in range(1))
    return Merged(weighted_mean(chain(devices, own)))
