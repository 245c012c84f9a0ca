"""FedDUMAP: FedDU's dynamic update, FedDUM's momentum and FedAP's pruning together; FedDUMAP-C, the same with
calibrated local training; and FedDUMAP-CS, where devices also hold a few of the server's samples.

FedDUMAP-C goes beyond the paper in these defaults:

- `train.calibration` = 1: while a node trains, its loss is the cross-entropy of z + log π_k, so that a device
  or a server with few classes does not suppress the others.
- `degree` = "device": D' is the mean of the devices' own degrees, which is positive when all take part.
- `c` = 0.35: these degrees are larger than that of a cohort's labels together; with ten devices of two of ten
  labels each, α is about the paper's.

FedDUMAP-CS is FedDUMAP-C whose devices are given `shared_samples` random samples of the server's, once. A
device of two classes then sees the server's classes beside its own, and learns to tell them apart, which
calibration alone does not teach it. The server's own part brings speed in the first rounds and, since devices
train on its samples too, costs accuracy later: with `decay` = 0.98 it ends after some 200 rounds.
"""

from __future__ import annotations

from dataclasses import replace

from feddumap.core.algorithm import Algorithm
from feddumap.methods.data_sharing import SharedSamples, Sharing, with_sharing
from feddumap.methods.fedap import Pruning, pruned
from feddumap.methods.feddu import Decay, DegreeOf, DynamicUpdate, Scale
from feddumap.methods.feddum import DeviceMomentum, ServerMomentum, feddum
from feddumap.methods.registry import method
from feddumap.methods.settings import TransferOnClock


@method("feddumap")
def feddumap(
    update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum, pruning: Pruning
) -> Algorithm:
    """Dynamic update, momentum and adaptive pruning: the whole of the paper."""
    return pruned(feddum(update, server, device), pruning)


class CalibratedUpdate(DynamicUpdate):
    c: Scale = 0.35
    degree: DegreeOf = "device"


@method("feddumap-c")
def feddumap_c(
    update: CalibratedUpdate, server: ServerMomentum, device: DeviceMomentum, pruning: Pruning
) -> Algorithm:
    """FedDUMAP with calibrated local training, and a share of the server that suits any cohort."""
    return replace(feddumap(update, server, device, pruning), calibration=1.0)


class BriefUpdate(CalibratedUpdate):
    decay: Decay = 0.98


class FewShared(Sharing):
    shared_samples: SharedSamples = 100
    transfer_on_clock: TransferOnClock = True


@method("feddumap-cs")
def feddumap_cs(
    update: BriefUpdate,
    server: ServerMomentum,
    device: DeviceMomentum,
    pruning: Pruning,
    sharing: FewShared,
) -> Algorithm:
    """FedDUMAP-C whose devices also train on a few of the server's samples, sent once."""
    return with_sharing(feddumap_c(update, server, device, pruning), sharing)
