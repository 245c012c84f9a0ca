"""Hybrid-FL: the server trains on its data like a device and joins the average.

server:  w ← (Σ n_k w_k + n0 w_0) / (Σ n_k + n0), with w_0 the server's model after E epochs from w
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from feddumap.core.algorithm import Algorithm, Merged, RoundView
from feddumap.core.messages import Upload
from feddumap.methods.fedavg import fedavg
from feddumap.methods.registry import method
from feddumap.methods.server_training import train_copy


def mean_with_server(uploads: Iterable[Upload], view: RoundView) -> Merged:
    """The weighted mean of the devices' models and the server's."""
    devices = ((upload.weight, upload.weights) for upload in uploads)
    server = view.context.server
    # a generator, so that the server trains only after all uploads have arrived
    own = ((len(server), train_copy(view.state.weights, server, view)) for _ in range(1))
    return Merged(view.combine(chain(devices, own)))


@method("hybrid-fl")
def hybrid_fl() -> Algorithm:
    """The server trains on its data like a device and joins the average."""
    return replace(fedavg(), aggregate=mean_with_server, mean_only=True, server_data=1)
