"""Whether this user knows the code that a run directory names.

A configuration may name code (`module:function`) as network, method or data set, and resuming imports and
calls it. A directory that names code has a signature of these names and of the files they were found in, made
with a key that only this user can read; directories that others made, or that were altered, have none that is
valid.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from feddumap.config import Config
from feddumap.core.object_names import is_object
from feddumap.data.cache import home
from feddumap.data.sources.code import is_code
from feddumap.errors import FeddumapError
from feddumap.models.factories import LIBRARIES
from feddumap.runs.integrity import checkpoints
from feddumap.system.json_text import parse_json

FILE = "code.json"
KEY_BYTES = 32
NOWHERE = "nowhere"


def code_of(directory: Path, config: Config) -> dict[str, str]:
    """The code that a run names, by key of the configuration; that of its checkpoints is included."""
    named = {"method.name": config.method.name, "model.name": config.model.name}
    if is_code(config.data.name):
        named["data.name"] = config.data.name
    for path in reversed(checkpoints(directory)):
        try:
            family = parse_json(path.read_text(encoding="utf-8"))["architecture"]["family"]
        except (OSError, ValueError, LookupError, TypeError):
            continue  # damaged, so nothing of it is used
        if family != config.model.name:
            named[path.stem] = str(family)
    return {key: name for key, name in named.items() if _is_imported(name)}


def _is_imported(name: str) -> bool:
    return ":" in name and not is_object(name) and name.partition(":")[0] not in LIBRARIES


def found_in(name: str) -> str:
    """The file that importing `module:attribute` would load first; nothing is imported."""
    top = name.partition(":")[0].partition(".")[0]
    try:
        found = next((spec for finder in sys.meta_path if (spec := finder.find_spec(top, None))), None)
        found = found or PathFinder.find_spec(top, [str(Path.cwd())])
    except (ImportError, ValueError, AttributeError):
        return NOWHERE
    if found is None:
        return NOWHERE
    origin = found.origin or next(iter(found.submodule_search_locations or ()), "")
    return str(Path(origin).resolve()) if found.has_location or not found.origin else origin


def signature_of(named: dict[str, str]) -> dict[str, str]:
    """The content of the signature file for some code; makes the key if there is none yet."""
    return {"hmac": hmac.new(_key(make=True), _message(named), hashlib.sha256).hexdigest()}


def is_known(directory: Path, named: dict[str, str]) -> bool:
    """Whether a directory has this user's signature for the code that it names."""
    try:
        value = parse_json((directory / FILE).read_text(encoding="utf-8"))
        given = value["hmac"]
        expected = hmac.new(_key(make=False), _message(named), hashlib.sha256).hexdigest()
        return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())
    except (OSError, ValueError, LookupError, TypeError):
        return False


def require(directory: Path, config: Config, action: str) -> None:
    """Raise an error if a directory names code and this user has not signed it. `action` is what would import
    it, such as `resuming`."""
    named = code_of(directory, config)
    if not named or is_known(directory, named):
        return
    shown = ", ".join(f"{key} = {name!r} ({_place(name)})" for key, name in named.items())
    raise FeddumapError(
        f"{directory} was not made by you here, and {action} it imports and runs code it names: {shown}; "
        f"modules are searched among the installed ones, then in the current folder {Path.cwd()}: look "
        "at that code, then give --trust (in Python trust=True) to run it"
    )


def _place(name: str) -> str:
    found = found_in(name)
    return "not found" if found == NOWHERE else f"found in {found}"


def _message(named: dict[str, str]) -> bytes:
    entries = sorted([key, name, found_in(name)] for key, name in named.items() if key.endswith(".name"))
    others = sorted([name, found_in(name)] for key, name in named.items() if not key.endswith(".name"))
    return json.dumps(["feddumap code", 1, entries, others]).encode()


def _key(make: bool) -> bytes:
    """This user's key. It is an OSError if there is none and none can be made, or if others can read it."""
    path = home() / f"trust-{os.geteuid()}.key"
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(KEY_BYTES))
            os.fsync(descriptor)
            os.link(fresh, path)  # never replaces the key of another process
        except FileExistsError:
            pass
        finally:
            os.close(descriptor)
            fresh.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise OSError(f"{path} is not a file that only this user can read: delete it")
        key = os.read(descriptor, KEY_BYTES)
    finally:
        os.close(descriptor)
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} is not a key of {KEY_BYTES} bytes: delete it")
    return key
