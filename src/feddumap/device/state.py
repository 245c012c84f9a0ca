"""What devices keep for themselves from one round they take part in to the next.

A device's memory never leaves it: no upload carries it and nobody is charged for it. Each piece is kept with
the round it was made in, and a device that trains in round t remembers the newest one made before t. So a
round that is done again, after a kill or a lost message, finds the memory that it found the first time.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from feddumap.core.messages import Tensors
from feddumap.core.tensors import digest
from feddumap.errors import FeddumapError
from feddumap.system.atomic_files import write_bytes


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
        for path in sorted(folder.glob("*-*.safetensors")):
            if match := re.fullmatch(r"(\d+)-(\d+)", path.stem):
                self._numbers.setdefault(int(match[1]), []).append(int(match[2]))

    def recall(self, device: int, before: int) -> Tensors:
        older = [number for number in self._numbers.get(device, []) if number < before]
        if not older:
            return {}
        try:
            return self._read(device, older[-1])
        except FeddumapError as error:
            raise FeddumapError(f"{error}: start the run anew under another name") from None

    def _read(self, device: int, number: int) -> Tensors:
        return load(self._path(device, number), f"the memory of device {device}")

    def keep(self, device: int, number: int, tensors: Tensors) -> None:
        save(self._path(device, number), tensors)
        known = self._numbers.get(device, [])
        self._numbers[device] = [other for other in known if other < number] + [number]

    def newest(self, before: int) -> dict[str, int]:
        """By device: the round of the memory that the state after `before` rounds rests on."""
        pairs = ((device, [n for n in known if n < before]) for device, known in self._numbers.items())
        return {str(device): older[-1] for device, older in pairs if older}

    def verify(self, newest: dict[str, int]) -> None:
        """A checkpoint whose memories are not all there and whole is an error."""
        for device, number in newest.items():
            self._read(int(device), number)

    def tidy(self, before: int) -> None:
        """Forget what no state from `before` rounds on could ask for."""
        for device, known in self._numbers.items():
            older = [number for number in known if number < before]
            for number in older[:-1]:
                self._path(device, number).unlink(missing_ok=True)
                known.remove(number)

    def _path(self, device: int, number: int) -> Path:
        return self._folder / f"{device:06d}-{number:06d}.safetensors"


def save(path: Path, tensors: Tensors) -> None:
    """Tensors as a file that vouches for itself; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_bytes(path, to_bytes(plain, {"digest": digest(plain)}))


def load(path: Path, what: str) -> Tensors:
    """The tensors of such a file; one that is damaged is an error that says what it was."""
    try:
        with safe_open(path, "pt") as file:
            tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if (file.metadata() or {}).get("digest") != digest(tensors):
                raise ValueError("its checksum does not match")
    except (OSError, ValueError, SafetensorError) as error:
        raise FeddumapError(f"cannot read {path}, {what} ({error})") from None
    return tensors
