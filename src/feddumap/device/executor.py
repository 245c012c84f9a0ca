"""The device side, whatever carries the messages: from a broadcast to an upload or an answer."""

from __future__ import annotations

from feddumap.config import Config
from feddumap.core.algorithm import Algorithm, Plan
from feddumap.core.messages import Answer, Broadcast, Question, Tensors, Upload
from feddumap.core.rng import layer_noise
from feddumap.core.tensors import all_finite
from feddumap.device.holdings import Holdings
from feddumap.device.surveys import answer
from feddumap.device.task import Task
from feddumap.training.loop import fit


class Executor:
    """Carries out what the server asks of a device."""

    def __init__(self, config: Config, holdings: Holdings, algorithm: Algorithm) -> None:
        self._config = config
        self._holdings = holdings
        self._algorithm = algorithm

    def train(self, broadcast: Broadcast, device: int, memory: Tensors) -> tuple[Upload, Tensors]:
        """What a device with this memory sends, and what it keeps (nothing anew, if what it sends or keeps
        is not finite)."""
        task = Task(device, broadcast, self._holdings, self._config, memory)
        with layer_noise(self._config.run.seed, "layers", broadcast.round, device):
            upload = self._algorithm.local(task, self._algorithm.device_data(task))
            if isinstance(upload, Plan):
                plan = upload
                upload = plan.report(fit(plan.model, plan.batches, plan.rule, broadcast.lr))
        good = not task.kept or (all_finite(task.kept) and all_finite(upload.weights))
        return upload, task.kept if good else {}

    def answer(self, question: Question, broadcast: Broadcast, device: int) -> Answer:
        with layer_noise(self._config.run.seed, "layers", question.name, broadcast.round, device):
            return answer(question, Task(device, broadcast, self._holdings, self._config))
