"""Which devices take part in a round."""

from feddumap.config import Config
from feddumap.core.rng import stream


def select(config: Config, number: int, secret: int | None = None) -> list[int]:
    """The devices of a round in ascending order: so many of the cohort, uniformly without replacement, or,
    with `privacy.sampling = "poisson"`, each with probability cohort/devices. They are drawn from the run's
    seed unless a `secret` is given."""
    rng = stream(config.run.seed if secret is None else secret, "select", number)
    if config.privacy.on and config.privacy.sampling == "poisson":
        joins = rng.random(config.data.devices) < config.train.cohort / config.data.devices
        return [int(device) for device in joins.nonzero()[0]]
    chosen = rng.choice(config.data.devices, size=config.train.cohort, replace=False)
    return sorted(int(device) for device in chosen)
