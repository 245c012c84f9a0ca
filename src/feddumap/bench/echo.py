"""A method without local training, named `feddumap.bench.echo:echo`."""

from feddumap.core.algorithm import Algorithm
from feddumap.core.messages import Upload
from feddumap.device.task import Task
from feddumap.training.samples import Samples


def echo() -> Algorithm:
    """Devices return the received model unchanged."""

    def local(task: Task, samples: Samples) -> Upload:
        return Upload(task.device, task.broadcast.round, len(samples), 0, task.broadcast.weights)

    return Algorithm(local=local)
