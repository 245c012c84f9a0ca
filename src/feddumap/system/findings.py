"""What a check of files finds."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "damaged", "recovered", "leftover"]


@dataclass(frozen=True)
class Finding:
    """The state of a file: `damaged` stays so, `recovered` was damaged and is not any more, and a `leftover`
    is a file that an interrupted process left behind."""

    path: str
    state: State
    message: str
