"""The screenings that a configuration can ask for, one file for each family of rules."""
from feddumap.config import Config
from feddumap.core.screening import NO_SCREENING, Screening


def of(config: Config) -> Screening:
    return NO_SCREENING
