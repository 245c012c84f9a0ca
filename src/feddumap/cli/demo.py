"""The demo's two runs: small enough for a minute on two cores, real enough to learn something."""

from feddumap.config import Config

TARGET = 0.8
INTRODUCTION = """\
Twenty devices learn to read handwritten digits. Each holds only a few of the ten digits, and in each round
five of them train. FedAvg averages what they learned. FedDUMAP also trains on the server's {images} images
(of eight digits), smooths the updates with momentum, and after eight rounds removes filters nobody needs,
so that devices download and compute less.
"""

FEDAVG = Config.parse(
    {
        "data": {
            "name": "digits",
            "devices": 20,
            "server_fraction": 0.15,
            "server_classes": 8,
            "augment": False,
        },
        "model": {"name": "lenet"},
        "train": {"rounds": 25, "cohort": 5, "lr": 0.05},
        "run": {"targets": [TARGET]},
    }
)
FEDDUMAP = FEDAVG.replace(method={"name": "feddumap", "prune_round": 8})
