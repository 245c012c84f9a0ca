"""The published CIFAR sets: digests to verify them, and a reader of their Python archives.

The archives contain pickles, and unpickling can execute arbitrary code. Nothing is unpickled here: a batch is
parsed as a list of opcodes, from which only the pixel bytes and the integer labels are taken.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pickletools
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from feddumap.data.dataset import Arrays, Contents, Inputs, Labels, find_problem
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Progress, ignore

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class PublishedDataset:
    """The known content of a published set.

    `train` and `test` are numbers of images. `batches` are the training files in the published order,
    `digests` the `digest` of each of them and of the test images; without digests only counts are checked.
    """

    name: str
    classes: tuple[str, ...]
    archive: str
    md5: str
    folder: str
    batches: tuple[str, ...]
    test_batch: str
    label: str
    digests: tuple[str, ...] = ()
    train: int = 50_000
    test: int = 10_000
    site: str = "https://www.cs.toronto.edu/~kriz/"

    @property
    def address(self) -> str:
        return self.site + self.archive

    @property
    def per_batch(self) -> int:
        return self.train // len(self.batches)


CIFAR10 = PublishedDataset(
    name="cifar10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    archive="cifar-10-python.tar.gz",
    md5="c58f30108f718f92721af3b95e74349a",
    folder="cifar-10-batches-py",
    batches=("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
    test_batch="test_batch",
    label="label",
    digests=(
        "5c3aa79ef222352f26d831f464b4e498b7ac64504c67e061f0888d2f598eac17",
        "8623c28744fe66bc93881232aa70f8aaf58464c513bf24ec11fdfd4c38494a97",
        "acf6124661f089f92d55359de67d4b8027dbf012b490254fe9095a4fff6ff3ed",
        "894a3fc10589cd2905c03c1da1fb4322a157a63c3cf1126c763c8f79d089d5b6",
        "fe2d07d13456ba4fa93bafc942aafed888109eb86fa15852d9b872761aeb1c74",
        "e54a434ec35094516eacbaac0f2f9550358d985e9d1f71b47d41d333c15ba304",
    ),
)

CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal
shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR100 = PublishedDataset(
    name="cifar100",
    classes=tuple(CIFAR100_CLASSES.split()),
    archive="cifar-100-python.tar.gz",
    md5="eb9058c3a382ffc7106e4002c42a8d85",
    folder="cifar-100-python",
    batches=("train",),
    test_batch="test",
    label="fine_label",
    digests=(
        "f062ca493c4d44a3d0921f223fbc3b1e88b46fd03322e97c635a0ac2a5f8baab",
        "bd251483addf0530bc3e831455074dfa75f7657056fc2639e6b6aced382c06a9",
    ),
)


def digest(images: Inputs, labels: Labels) -> str:
    """A platform-independent sha256 of images and labels."""
    state = hashlib.sha256(np.ascontiguousarray(images).data)
    state.update(labels.astype("<i8").data)
    return state.hexdigest()


def verified(spec: PublishedDataset, arrays: Arrays, origin: Path) -> Arrays:
    """Verify arrays against the published set, and return them in the published order.

    Some copies hold the training batches in another order. They are reordered, because a split by index must
    not depend on the source.
    """
    problem = find_problem(Contents(arrays, spec.classes, str(origin)))
    if problem:
        raise FeddumapError(f"{origin} {problem}: get another copy of {spec.name}")
    for split, labels, expected in (
        ("training", arrays.train_labels, spec.train),
        ("test", arrays.test_labels, spec.test),
    ):
        if len(labels) != expected:
            counts = f"{len(labels)} {split} images, expected {expected}"
            raise FeddumapError(f"{origin} holds {counts}: get a complete copy")
        if (np.bincount(labels, minlength=len(spec.classes)) != expected // len(spec.classes)).any():
            raise FeddumapError(
                f"{origin} does not hold {expected // len(spec.classes)} {split} images of each class as "
                f"{spec.name} does: get another copy"
            )
    return _in_published_order(spec, arrays, origin) if spec.digests else arrays


def _in_published_order(spec: PublishedDataset, arrays: Arrays, origin: Path) -> Arrays:
    size = spec.per_batch
    starts = range(0, spec.train, size)
    batches = [(arrays.train_inputs[i : i + size], arrays.train_labels[i : i + size]) for i in starts]
    found = {digest(*batch): batch for batch in batches}
    *train, test = spec.digests
    if set(found) != set(train) or digest(arrays.test_inputs, arrays.test_labels) != test:
        raise FeddumapError(
            f"the images or labels of {origin} differ from the published {spec.name}: get another copy, or "
            "save them as an .npz file to use them as your own data set"
        )
    if list(found) == train:
        return arrays
    images, labels = zip(*(found[name] for name in train), strict=True)
    return arrays._replace(train_inputs=np.concatenate(images), train_labels=np.concatenate(labels))


def read_batch(raw: bytes, n: int, key: str, origin: str) -> tuple[Inputs, Labels]:
    """Inputs and labels of one pickled batch of `n` images, whose labels are stored under `key`."""
    data = b""
    labels: list[int] = []
    reading = b""  # the key whose value is being read
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            if isinstance(argument, str | bytes):
                text = argument.encode("latin-1") if isinstance(argument, str) else argument
                if reading == b"data" and len(text) == n * PIXELS:
                    data = text
                if text in (b"data", key.encode()):
                    reading = text
                elif reading == key.encode():
                    reading = b""  # the next key ends the list of labels
            elif isinstance(argument, int) and reading == key.encode() and opcode.name.startswith("BININT"):
                labels.append(argument)
    except ValueError as error:
        raise FeddumapError(f"{origin} is truncated or not a pickle ({error}): get another copy") from None
    if not data:
        raise FeddumapError(f"{origin} has no 'data' of {n} images ({n * PIXELS} bytes): get another copy")
    if len(labels) != n:
        raise FeddumapError(f"{origin} has {len(labels)} '{key}', expected {n}: get another copy")
    planes = np.frombuffer(data, np.uint8).reshape(n, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), np.array(labels, np.int64)


def size_limits(spec: PublishedDataset) -> dict[str, int]:
    """Upper bounds on the file sizes in bytes: pixels, label and file name of every image."""
    counts = dict.fromkeys(spec.batches, spec.per_batch) | {spec.test_batch: spec.test}
    return {name: 65_536 + n * (PIXELS + 128) for name, n in counts.items()}


def from_folder(folder: Path, spec: PublishedDataset, progress: Progress = ignore) -> Arrays:
    """Read the unpacked archive."""
    raw = {}
    for name, limit in size_limits(spec).items():
        path = folder / name
        try:
            if path.stat().st_size > limit:
                raise FeddumapError(f"{path} has more than the expected {limit} bytes: get another copy")
            raw[name] = path.read_bytes()
        except OSError as error:
            raise FeddumapError(f"cannot read {path} ({error.strerror}): get another copy") from None
    return _assemble(raw, folder, spec, progress)


def from_archive(path: Path, spec: PublishedDataset, progress: Progress = ignore) -> Arrays:
    """Read the published archive; nothing is extracted to disk."""
    wanted = {f"{spec.folder}/{name}": limit for name, limit in size_limits(spec).items()}
    raw = read_members(path, wanted)
    return _assemble({Path(name).name: content for name, content in raw.items()}, path, spec, progress)


def read_members(path: Path, wanted: Mapping[str, int]) -> dict[str, bytes]:
    """Read the `wanted` members of a .tar.gz file; the values of `wanted` are limits on their sizes in
    bytes."""
    raw: dict[str, bytes] = {}
    try:
        limit = sum(wanted.values()) * 2 + (1 << 20)
        with gzip.open(path) as content, tarfile.open(fileobj=_Bounded(content, limit), mode="r|") as tar:
            for member in tar:
                if member.name not in wanted or member.name in raw:
                    continue
                if member.size > wanted[member.name]:
                    raise FeddumapError(f"{path}: {member.name} is larger than expected: get another copy")
                file = tar.extractfile(member) if member.isreg() else None
                raw[member.name] = file.read() if file else b""
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        raise FeddumapError(f"{path} is truncated or not a .tar.gz ({error}): get another copy") from None
    missing = sorted(set(wanted) - set(raw))
    if missing:
        raise FeddumapError(f"{path} lacks {', '.join(missing)}: get another copy")
    return raw


class _Bounded(io.BufferedIOBase):
    """A file of which no more than `limit` bytes can be read: an archive may decompress to any size, and its
    headers are read as a whole."""

    def __init__(self, file: gzip.GzipFile, limit: int) -> None:
        self._file, self._left = file, limit

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise tarfile.ReadError("it decompresses to more than twice the expected size")
        return data


def _assemble(raw: Mapping[str, bytes], origin: Path, spec: PublishedDataset, progress: Progress) -> Arrays:
    names: Iterable[str] = (*spec.batches, spec.test_batch)
    counts = [spec.per_batch] * len(spec.batches) + [spec.test]
    parts = []
    for name, n in zip(names, counts, strict=True):
        parts.append(read_batch(raw[name], n, f"{spec.label}s", f"{origin}: {name}"))
        progress(f"reading {spec.name}", sum(len(labels) for _, labels in parts), spec.train + spec.test)
    return concatenated(parts)


def concatenated(parts: list[tuple[Inputs, Labels]]) -> Arrays:
    """Concatenate training parts; the last part is the test part."""
    *train, (test_inputs, test_labels) = parts
    images, labels = zip(*train, strict=True)
    return Arrays(np.concatenate(images), np.concatenate(labels), test_inputs, test_labels)
