"""FedDUMAP: FedDU's dynamic update, FedDUM's momentum and FedAP's pruning together."""

from __future__ import annotations

from feddumap.core.algorithm import Algorithm
from feddumap.methods.fedap import Pruning, pruned
from feddumap.methods.feddu import DynamicUpdate
from feddumap.methods.feddum import DeviceMomentum, ServerMomentum, feddum
from feddumap.methods.registry import method


@method("feddumap")
def feddumap(
    update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum, pruning: Pruning
) -> Algorithm:
    """Dynamic update, momentum and adaptive pruning: the whole of the paper."""
    return pruned(feddum(update, server, device), pruning)
