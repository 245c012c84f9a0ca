"""A cohort whose uploads the server sees only as their mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from feddumap.core.messages import Broadcast, MissingUpload, Upload
from feddumap.errors import FeddumapError
from feddumap.flower import requests, secagg
from feddumap.flower.cohort import TRIES, FlowerCohort
from feddumap.methods.secure import FEWEST


class SecureCohort(FlowerCohort):
    """In a round, every device's upload is the mean of all: what the server computes of them, by their
    samples, is the mean again. A device that drops out between two messages of the protocol may end it; the
    round is then repeated."""

    def train(self, broadcast: Broadcast, devices: Sequence[int]) -> Iterator[Upload | MissingUpload]:
        for name, tensor in broadcast.weights.items():
            if not tensor.dtype.is_floating_point:
                raise FeddumapError(
                    f"run.secure = true: {name} holds integers, which have no mean: use a network without "
                    "batch normalization's counters"
                )
        need = max(FEWEST, self._least(devices))
        for attempt in range(TRIES):
            wait = self._config.run.timeout if attempt else 0.0
            self._membership.find(devices, need if attempt else len(devices), wait)
            members = self._membership.members
            nodes = {device: members[device].node for device in devices if device in members}
            if len(nodes) >= need:
                found = self._aggregate(broadcast, nodes)
                if found.update is not None and len(found.samples) >= need:
                    return self._uploads(broadcast, devices, nodes, found)
            self._say(f"round {broadcast.round}: too few devices for secure aggregation")
        raise FeddumapError(
            f"round {broadcast.round}: secure aggregation needs {need} of {len(devices)} devices from its "
            f"first message to its last, and had fewer in {TRIES} tries: fix the nodes, then resume"
        )

    def _aggregate(self, broadcast: Broadcast, nodes: Mapping[int, int]) -> secagg.Aggregated:
        tensors = requests.pack_broadcast(broadcast)
        members = self._membership.members
        contents = {
            node: self._message(device, members[device], broadcast, None, tensors)
            for device, node in nodes.items()
        }
        most = max(map(self._most_samples, nodes))
        return secagg.aggregate(self._grid, broadcast.round, contents, most, self._config.run.timeout)

    def _uploads(
        self,
        broadcast: Broadcast,
        devices: Sequence[int],
        nodes: Mapping[int, int],
        found: secagg.Aggregated,
    ) -> Iterator[Upload | MissingUpload]:
        assert found.update is not None
        weights = secagg.updated(broadcast.weights, found.update)
        for device in devices:
            node = nodes.get(device, -1)
            if node not in found.samples:
                self._membership.forget(device)
                yield MissingUpload(device, "it did not take part in the secure aggregation")
                continue
            samples = found.samples[node]
            if not 0 < samples <= self._most_samples(device):
                raise FeddumapError(
                    f"round {broadcast.round}: device {device} claims {samples} samples, not 1 to "
                    f"{self._most_samples(device)}, and its part in the mean cannot be removed: remove its "
                    "node, then resume"
                )
            self._membership.mark_shared(device)
            self._membership.mark_frozen(device, broadcast.architecture.frozen)
            yield Upload(device, broadcast.round, samples, found.steps[node], weights, finite=True)

    def _most_samples(self, device: int) -> int:
        """What the device said it has, and what the server shares with it."""
        given = min(self._shared, len(self._holdings.split.server))
        return self._samples.get(device, 1) + given
