"""The demo's configuration: small enough for a minute on two cores, real enough to learn something."""

from feddumap.config import Config

CONFIG = Config.parse(
    {
        "data": {"name": "digits", "devices": 20, "augment": False},
        "model": {"name": "lenet"},
        "train": {"rounds": 30, "lr": 0.05},
    }
)
