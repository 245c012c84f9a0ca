"""Code of other packages and of the user: entry points, and objects named `module:attribute`."""

from __future__ import annotations

import os
import sys
import traceback
from functools import reduce
from importlib import import_module, invalidate_caches, metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from feddumap.errors import FeddumapError

TRACEBACK = "FEDDUMAP_TRACEBACK"
OURS, PYTHON = Path(__file__).parents[1], Path(traceback.__file__).parent


def entry_points(group: str) -> dict[str, EntryPoint]:
    """What installed packages offer in a group, by name and in order of name. Nothing is imported."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(metadata.entry_points(group=group), key=lambda entry: (entry.name, origin(entry))):
        found.setdefault(entry.name, entry)
    return found


def origin(entry: EntryPoint) -> str:
    """The package that offers an entry point, and its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"


def load_entry(entry: EntryPoint, what: str) -> Any:
    """The object of an entry point; `what` names it in errors, such as `method`."""
    others = [
        origin(other)
        for other in metadata.entry_points(group=entry.group, name=entry.name)
        if other.value != entry.value
    ]
    if others:
        raise FeddumapError(
            f"{what} {entry.name!r} is offered by {origin(entry)} and by {', '.join(sorted(others))}: "
            f"uninstall one, or name the {what} as module:attribute"
        )
    return _load(f"{what} {entry.name!r} of {origin(entry)}", entry.value, "install a version that works")


def load_object(name: str, what: str) -> Any:
    """The object that `module:attribute` names, from the module search path or from the current folder.

    `what` names it in errors, such as `method` or `model`.
    """
    return _load(
        f"{what} {name!r}", name, f"expected module:{what} of a module that is installed or in this folder"
    )


def _load(subject: str, path: str, advice: str) -> Any:
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise FeddumapError(f"{subject} cannot be imported: {advice}")
    folder = str(Path.cwd())
    if folder not in sys.path:  # installed commands do not look there; last, as in worker processes
        sys.path.append(folder)
    invalidate_caches()
    try:
        return reduce(getattr, attribute.split("."), import_module(module))
    except FeddumapError:
        raise
    except Exception as error:  # whatever a module does when it is imported
        if show_tracebacks():
            raise
        known = isinstance(error, ImportError | AttributeError | ValueError)
        reason = error if known else f"{type(error).__name__}: {error}"
        raise FeddumapError(
            f"{subject} cannot be imported ({location(error, reason)}): {advice if known else 'fix it'}"
        ) from error


def show_tracebacks() -> bool:
    """Whether exceptions of the user's code are to be shown as they are, and not as one sentence."""
    return os.environ.get(TRACEBACK) == "1"


def location(error: BaseException, reason: object) -> str:
    """`reason`, preceded by the file and line of the user's code that an error comes from, if any."""
    where = user_line(error)
    return f"{where}: {reason}" if where else str(reason)


def user_line(error: BaseException) -> str:
    """`file:line` of the user's code in a traceback: the innermost line that is neither ours nor of an
    installed package, else the outermost of an installed package; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    theirs = [(file, line) for file, line in frames if not _is_ours(file)]
    own = [place for place in theirs if not {"site-packages", "dist-packages"} & set(Path(place[0]).parts)]
    chosen = own[-1:] or theirs[:1]
    return "".join(f"{file}:{line}" for file, line in chosen)


def _is_ours(file: str) -> bool:
    """Whether a file belongs to feddumap or to Python."""
    path = Path(file)
    if file.startswith("<frozen") or path.is_relative_to(OURS):
        return True
    return path.is_relative_to(PYTHON) and not {"site-packages", "dist-packages"} & set(path.parts)
