"""The same methods over Flower, whose nodes are the devices.

Importing this package turns the telemetry of Flower and Ray off.
"""

import os

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise Ray warns of a future change
    "RAY_worker_niceness": "0",  # training is the main work, not a background task
}
"""Variables that turn telemetry, irrelevant warnings and low priority off, unless they are set already."""

for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)  # before flwr is imported
