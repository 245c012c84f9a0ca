"""Data-sharing (Zhao et al., 2018): FedAvg whose devices also train on samples that the server gave them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from feddumap.core.algorithm import Algorithm, with_shared
from feddumap.methods.fedavg import fedavg
from feddumap.methods.registry import method
from feddumap.methods.settings import Transfer

SharedSamples = Annotated[
    int, Field(ge=1, description="samples of the server's that each device is given, at most")
]


class Sharing(Transfer):
    shared_samples: SharedSamples = 2000


def with_sharing(base: Algorithm, settings: Sharing) -> Algorithm:
    """Any method whose devices train on what they hold, with samples of the server's besides."""
    limit = settings.shared_samples
    return replace(
        base,
        device_data=with_shared(limit),
        shared=limit,
        shared_on_clock=settings.transfer_on_clock,
        server_data=1,
    )


@method("data-sharing")
def data_sharing(settings: Sharing) -> Algorithm:
    """Each device is given some of the server's data before the first round (Zhao et al.)."""
    return with_sharing(fedavg(), settings)
