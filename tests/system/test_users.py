"""Who else may use a machine."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

import pytest

from feddumap.system import users


def account(name: str, uid: int, shell: str) -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", uid, uid, "", "/", shell))


def test_accounts_that_can_log_in_and_owners_of_processes_are_users(monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getuid()
    accounts = [
        account("root", 0, "/bin/bash"),
        account("me", me or 999, "/bin/bash"),
        account("alice", 4001, "/usr/bin/zsh"),
        account("daemon", 4002, "/usr/sbin/nologin"),
        account("sync", 4003, "/bin/sync"),
        account("off", 4004, "/bin/false"),
        account("www", 4005, "/usr/sbin/nologin"),
    ]
    monkeypatch.setattr(users.pwd, "getpwall", lambda: accounts)
    monkeypatch.setattr(users.os, "getuid", lambda: me or 999)
    monkeypatch.setattr(users, "_running", lambda: {0, me or 999, 4005, 70000})
    assert users.other_users() == ["alice", "uid 70000", "www"]


@pytest.mark.skipif(
    not Path("/proc/self").exists() or os.geteuid() != 0, reason="becomes another user: needs root and /proc"
)
def test_a_process_of_another_user_is_found() -> None:
    with subprocess.Popen(["/bin/sleep", "60"], user=4321, cwd="/") as process:
        try:
            assert 4321 in users._running()
            assert "uid 4321" in users.other_users()
        finally:
            process.kill()
