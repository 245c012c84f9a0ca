"""Seconds a round of Flower's simulation engine: Ray, two actors of one CPU and one thread each.

    python benchmarks/peers/flower_rounds.py --model lenet [--rounds 3] [--epochs 5] [--empty]

The code follows Flower's PyTorch quickstart: a ClientApp with a train function and a DataLoader, a ServerApp
with the built-in FedAvg. `--empty` devices return the arrays they got. Prints one line of JSON.
"""

import os
import sys

# before Flower or Ray is imported: no telemetry, no question whether there is a newer version
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import argparse
import json
import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from task import BATCH, COHORT, DEVICES, EPOCHS, LR, SAMPLES, network, partition, report
from torch import nn
from torch.utils.data import DataLoader

ACTORS = 2


def train(model: nn.Module, loader: DataLoader, epochs: int) -> float:
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.train()
    running = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
    return running / (epochs * len(loader))


def reply(message: Message, arrays: ArrayRecord, loss: float) -> Message:
    metrics = MetricRecord({"train_loss": loss, "num-examples": SAMPLES})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def training_client(name: str, epochs: int) -> ClientApp:
    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = network(name)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        data = partition(int(context.node_config["partition-id"]))
        loss = train(model, DataLoader(data, batch_size=BATCH, shuffle=True), epochs)
        return reply(message, ArrayRecord(model.state_dict()), loss)

    return app


def empty_client() -> ClientApp:
    app = ClientApp()

    @app.train()
    def give_back(message: Message, context: Context) -> Message:
        return reply(message, message.content["arrays"], 0.0)

    return app


def server(name: str, rounds: int, ends: list[float]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        def note(number: int, arrays: ArrayRecord) -> None:
            """Called by the strategy after each round, and before the first; evaluates nothing."""
            if number:
                ends.append(time.time())

        strategy = FedAvg(fraction_train=COHORT / DEVICES, fraction_evaluate=0.0, min_available_nodes=DEVICES)
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(network(name).state_dict()),
            num_rounds=rounds,
            evaluate_fn=note,
        )

    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to time, after a first one")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--empty", action="store_true", help="devices return what they got")
    options = parser.parse_args()

    ends: list[float] = []
    run_simulation(
        server_app=server(options.model, options.rounds + 1, ends),
        client_app=empty_client() if options.empty else training_client(options.model, options.epochs),
        num_supernodes=DEVICES,
        backend_config={
            "init_args": {"num_cpus": ACTORS},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    if len(ends) != options.rounds + 1:
        sys.exit(f"{len(ends)} of {options.rounds + 1} rounds ended")
    print(json.dumps(report(ends)))


if __name__ == "__main__":
    main()
