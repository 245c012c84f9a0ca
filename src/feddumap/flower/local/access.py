"""Whether other users of this machine can use a federation's control interface."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from feddumap.errors import FeddumapError
from feddumap.flower.local.control import direct_control
from feddumap.flower.local.programs import DIRECT
from feddumap.system.users import other_users

TESTED = "1.41"
NAMED = 5  # users that an error names


def check_closed(address: str, certificate: Path) -> None:
    """An error if the SuperLink accepts a control request without the token."""
    with direct_control(address, certificate, DIRECT, None) as stranger:
        if not stranger.refused():
            raise FeddumapError(
                f"Flower {version('flwr')} accepts control requests without the token that it was told to "
                "require, so that any user of this machine could start programs as you: install the version "
                f"that feddumap was tested with, flwr {TESTED}"
            )


def check_alone(missing: str) -> None:
    """An error if this machine has other users, to whom Flower's own commands are open. `missing` is the part
    of Flower without which only those can be used."""
    if others := other_users():
        names = ", ".join(others[:NAMED]) + (" and others" if len(others) > NAMED else "")
        raise FeddumapError(
            f"Flower {version('flwr')} lacks an internal part that feddumap uses to close Flower's control "
            f"interface ({missing}), and this machine has other users ({names}), who could start programs as "
            f"you and read your keys: install flwr {TESTED}, or give --shared-machine if you trust them"
        )
