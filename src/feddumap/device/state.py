"""What devices keep for themselves from one round they take part in to the next.

A device's memory never leaves it: no upload carries it and nobody is charged for it. Each piece is kept with
the round it was made in, and a device that trains in round t remembers the newest one made before t. So a
round that is done again, after a kill or a lost message, finds the memory that it found the first time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from feddumap.core.messages import Tensors
from feddumap.core.tensors import digest
from feddumap.errors import FeddumapError
from feddumap.system.atomic_files import leftovers, make_folder, remove, write_bytes

NAMES = r"(\d+-\d+|gift|frozen-\w+)\.safetensors"  # of the files in a device's folder
SHORT = 16  # hexadecimal digits of a digest in a checkpoint


class StateStore(Protocol):
    """The memories of simulated devices."""

    def recall(self, device: int, before: int) -> Tensors:
        """What a device kept in the last round it trained in before round `before`; nothing at first."""
        ...

    def keep(self, device: int, number: int, tensors: Tensors) -> None:
        """What a device keeps from round `number`."""
        ...


class InMemoryStore:
    """Memories in this process: for a run that is not kept on disk."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, Tensors]] = {}

    def recall(self, device: int, before: int) -> Tensors:
        pieces = self._pieces.get(device, {})
        return pieces[max(older)] if (older := [number for number in pieces if number < before]) else {}

    def keep(self, device: int, number: int, tensors: Tensors) -> None:
        pieces = self._pieces.setdefault(device, {})
        older = [other for other in pieces if other < number]
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        self._pieces[device] = {other: pieces[other] for other in older[-1:]} | {number: own}


class FileStore:
    """Memories as files of a folder, DEVICE-ROUND.safetensors each, however many devices there are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers: dict[int, list[int]] = {}
        self._digests: dict[tuple[int, int], str] = {}  # of those that were written or read
        for path in sorted(folder.glob("*-*.safetensors")):
            if match := re.fullmatch(r"(\d+)-(\d+)", path.stem):
                self._numbers.setdefault(int(match[1]), []).append(int(match[2]))

    def clean(self) -> None:
        """Delete the temporary files of processes that were killed."""
        for path in leftovers(self._folder, NAMES):
            remove(path)

    def recall(self, device: int, before: int) -> Tensors:
        older = [number for number in self._numbers.get(device, []) if number < before]
        if not older:
            return {}
        try:
            return self._read(device, older[-1])
        except FeddumapError as error:
            raise FeddumapError(f"{error}: start the run anew under another name") from None

    def _read(self, device: int, number: int) -> Tensors:
        path, what = self._path(device, number), f"the memory of device {device}"
        tensors, metadata = load_with_metadata(path, what)
        owner = metadata.get("device"), metadata.get("round")
        # files of versions that did not name the device have neither
        if owner not in ((None, None), (str(device), str(number))):
            raise FeddumapError(
                f"{path} holds the memory of device {owner[0]} from round {owner[1]}, expected device "
                f"{device} and round {number}"
            )
        self._digests[device, number] = metadata["digest"][:SHORT]
        return tensors

    def keep(self, device: int, number: int, tensors: Tensors) -> None:
        owner = {"device": str(device), "round": str(number)}
        self._digests[device, number] = save(self._path(device, number), tensors, owner)[:SHORT]
        known = self._numbers.get(device, [])
        self._numbers[device] = [other for other in known if other < number] + [number]

    def newest(self, before: int) -> dict[str, int]:
        """By device: the round of the memory that the state after `before` rounds rests on."""
        pairs = ((device, [n for n in known if n < before]) for device, known in self._numbers.items())
        return {str(device): older[-1] for device, older in pairs if older}

    def digests(self, newest: dict[str, int]) -> dict[str, str]:
        """By device: the start of the digest of its memory, of those that this process wrote or read."""
        pairs = ((device, self._digests.get((int(device), number))) for device, number in newest.items())
        return {device: found for device, found in pairs if found is not None}

    def verify(self, newest: dict[str, int], digests: Mapping[str, str] | None = None) -> None:
        """A checkpoint whose memories are not all there, whole and those it was made with is an error."""
        for device, number in newest.items():
            self._read(int(device), number)
            expected = (digests or {}).get(device)
            if expected is not None and expected != self._digests[int(device), number]:
                raise FeddumapError(
                    f"{self._path(int(device), number)} is not the memory that the checkpoint was made with"
                )

    def tidy(self, before: int) -> None:
        """Forget what no state from `before` rounds on could ask for."""
        for device, known in self._numbers.items():
            older = [number for number in known if number < before]
            for number in older[:-1]:
                remove(self._path(device, number))
                known.remove(number)
                self._digests.pop((device, number), None)

    def _path(self, device: int, number: int) -> Path:
        return self._folder / f"{device:06d}-{number:06d}.safetensors"


def save(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> str:
    """Tensors as a file that vouches for itself, and their digest; its folder is made if need be."""
    make_folder(path.parent)
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    made = digest(plain)
    write_bytes(path, to_bytes(plain, {**(metadata or {}), "digest": made}))
    return made


def load(path: Path, what: str) -> Tensors:
    """The tensors of such a file; one that is damaged is an error that says what it was."""
    return load_with_metadata(path, what)[0]


def load_with_metadata(path: Path, what: str) -> tuple[Tensors, dict[str, str]]:
    """The tensors of such a file and its metadata, "digest" among them."""
    try:
        with safe_open(path, "pt") as file:
            tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("digest") != digest(tensors):
                raise ValueError("its checksum does not match")
    except (OSError, ValueError, SafetensorError) as error:
        raise FeddumapError(f"cannot read {path}, {what} ({error})") from None
    return tensors, metadata
