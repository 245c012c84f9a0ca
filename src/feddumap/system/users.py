"""Who else may use this machine."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

NO_LOGIN = ("nologin", "false", "sync", "shutdown", "halt", "")  # names of programs that are not shells
ROOT = 0


def other_users() -> list[str]:
    """The names of other users of this machine: accounts with a login shell, and owners of running processes.
    Root is not counted, as nothing can be hidden from it."""
    accounts = {each.pw_uid: each for each in pwd.getpwall()}
    found = {uid for uid, each in accounts.items() if Path(each.pw_shell).name not in NO_LOGIN}
    found |= _running()
    found -= {os.getuid(), ROOT}
    return sorted(accounts[uid].pw_name if uid in accounts else f"uid {uid}" for uid in found)


def _running() -> set[int]:
    """The owners of processes; empty where there is no /proc."""
    owners = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            owners.add(entry.stat().st_uid)
        except OSError:  # it exited
            continue
    return owners
