"""Which devices take part in a round."""

from feddumap.config import Config
from feddumap.core.rng import stream


def select(config: Config, number: int) -> list[int]:
    """The devices of a round: uniformly without replacement, in ascending order."""
    rng = stream(config.run.seed, "select", number)
    chosen = rng.choice(config.data.devices, size=config.train.cohort, replace=False)
    return sorted(int(device) for device in chosen)
