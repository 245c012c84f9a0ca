"""The same methods over Flower: its nodes are the devices, and it carries the messages.

Whoever imports this package has Flower and Ray send nothing about their use to anybody.
"""

import os

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of a change to come
    "RAY_worker_niceness": "0",  # the devices' training is the work, not something beside it
}
"""Variables that keep Flower and Ray from calling home, from warning of what does not matter here, and from
giving way to everything else on the machine."""

for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)  # before flwr is imported
