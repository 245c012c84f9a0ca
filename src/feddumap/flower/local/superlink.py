"""`python -m feddumap.flower.local.superlink`: a flower-superlink whose control interface requires a token.

Whoever may use a SuperLink's control interface may start runs, which are programs that the server and the
devices execute. Flower's free distribution accepts every request there, from any user of the machine. It has
an interface for authentication plugins, though, and the command `flwr` sends the token that it finds in its
`credentials.yaml`. The plugin here accepts the token in the file of `--control-token-file` and nothing else.
All other arguments are those of `flower-superlink`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from feddumap.flower.internals import (
    ACCESS_TOKEN_KEY,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    AccountInfo,
    AuthnType,
    ControlAuthnPlugin,
    config_loader,
    flower_superlink,
)

LEAST = 32  # characters of a token

Metadata = Sequence[tuple[str, str | bytes]]


class TokenPlugin(ControlAuthnPlugin):
    """Accepts requests that carry the token, as the one account of Flower's free distribution. There is no
    login, and tokens are not renewed."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def validate_tokens_in_metadata(self, metadata: Metadata) -> tuple[bool, AccountInfo | None]:
        given = dict(metadata).get(ACCESS_TOKEN_KEY, "")
        given = given.encode("utf-8", "surrogateescape") if isinstance(given, str) else given
        if not secrets.compare_digest(given, self._token):
            return False, None
        return True, AccountInfo(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME)

    def get_login_details(self) -> None:
        return None

    def get_auth_tokens(self, device_code: str) -> None:
        return None

    def refresh_tokens(self, metadata: Metadata) -> tuple[None, None]:
        return None, None


def require_token(token: str) -> None:
    """Make the SuperLink of this process require the token. Flower looks for a plugin by the name `oidc`, and
    exits if there is none."""
    plugins = {AuthnType.OIDC: partial(TokenPlugin, token)}
    setattr(config_loader, "get_control_authn_plugins", lambda: plugins)  # noqa: B010 (Flower has no setter)
    os.environ["FLWR_OIDC_ENABLED"] = "1"


def read_token(path: Path) -> str:
    """The token in a file; exits with a sentence if there is none."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--control-token-file {path}: {error}")
    if len(token) < LEAST or not token.isalnum():
        sys.exit(f"--control-token-file {path}: expected at least {LEAST} letters and digits")
    return token


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="feddumap.flower.local.superlink", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--control-token-file", type=Path, required=True)
    found, rest = parser.parse_known_args()
    require_token(read_token(found.control_token_file))
    sys.argv = ["flower-superlink", *rest]
    flower_superlink()


if __name__ == "__main__":
    main()
