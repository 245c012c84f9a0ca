"""Seconds a round of pfl-research, one thread a process.

    python benchmarks/peers/pfl_rounds.py --model lenet [--rounds 3] [--epochs 5]
    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/peers/pfl_rounds.py …

The code follows its image classification benchmark: federated averaging on users' tensors, weighted by their
number. Started by torchrun, pfl shares a cohort among the processes by itself. Prints one line of JSON.
"""

import argparse
import json
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from task import BATCH, COHORT, DEVICES, EPOCHS, LR, SAMPLES, network, partition, report
from torch import nn

NEVER = 10**9


class Classifier(nn.Module):
    """A network with what pfl asks of one: a loss, and metrics for evaluation."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.train()
        return nn.functional.cross_entropy(self(images), labels)

    @torch.no_grad()
    def metrics(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Weighted]:
        self.eval()
        loss = nn.functional.cross_entropy(self(images), labels, reduction="sum").item()
        return {"loss": Weighted(loss, len(images))}


class Note(TrainingProcessCallback):
    """Remembers when each round ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.ends.append(time.time())
        return False, Metrics()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to time, after a first one")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.random.manual_seed(0)
    np.random.seed(0)
    users = {device: partition(device).tensors for device in range(DEVICES)}
    data = FederatedDataset.from_slices(users, get_user_sampler("minimize_reuse", range(DEVICES)))
    module = Classifier(network(options.model))
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    note = Note()
    # round 0 is always evaluated on its users by pfl; it is the first round, which is not timed
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=options.rounds + 1,
            evaluation_frequency=NEVER,
            train_cohort_size=COHORT,
            val_cohort_size=None,
        ),
        model_train_params=NNTrainHyperParams(
            local_learning_rate=LR, local_num_epochs=options.epochs, local_batch_size=BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=SAMPLES),
        callbacks=[note],
        send_metrics_to_platform=False,
    )
    if pytorch_ops.distributed.global_rank == 0:
        print(json.dumps({"processes": pytorch_ops.distributed.world_size, **report(note.ends)}))


if __name__ == "__main__":
    main()
