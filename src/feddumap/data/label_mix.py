"""Label mixes, their divergence (the paper's non-IID degree) and its figures for a split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from feddumap.config import Config, DataConfig
from feddumap.core.sampling import select
from feddumap.data import partition
from feddumap.data.partition import Split
from feddumap.data.sources import catalog
from feddumap.errors import FeddumapError
from feddumap.system.callbacks import Say

Floats = npt.NDArray[np.float64]


def mix(counts: npt.ArrayLike) -> Floats:
    """P(y) = n_y / Σ n_y along the last axis: normalises counts or probabilities.

    >>> mix([[1, 3], [5, 0]])
    array([[0.25, 0.75],
           [1.  , 0.  ]])
    """
    value = np.asarray(counts, dtype=np.float64)
    if value.ndim == 0 or not np.isfinite(value).all() or (value < 0).any():
        raise FeddumapError(
            f"label counts {_shown(value)}: expected finite non-negative numbers, one per class"
        )
    total = value.sum(axis=-1, keepdims=True)
    if (total == 0).any():
        raise FeddumapError(
            f"label counts {_shown(value)}: a node without images has no label mix; exclude it"
        )
    return np.asarray(value / total)


def divergence(p: npt.ArrayLike, q: npt.ArrayLike) -> Floats:
    """Jensen-Shannon divergence in bits, D(P) of the paper, along the last axis.

        D_JS(P, Q) = ½ D_KL(P ‖ M) + ½ D_KL(Q ‖ M),   M = ½ (P + Q)
        D_KL(P ‖ M) = Σ_y P(y) log₂(P(y) / M(y))

    Counts are normalised first and terms with P(y) = 0 are 0. The result is in [0, 1]: 0 for equal mixes, 1
    for mixes without a common class. The arguments broadcast: matrices are compared row by row, a vector with
    each row of a matrix; two vectors give a 0-d array.

    Uniform over 2, 5 and all of 10 classes against uniform, the paper's d₁, d₂ and d₃:

    >>> rows = np.arange(10) < np.array([[2], [5], [10]])
    >>> divergence(rows, np.ones(10)).round(4)
    array([0.61  , 0.3113, 0.    ])
    >>> float(divergence([1, 0], [0, 7]))
    1.0
    """
    left, right = mix(p), mix(q)
    value = (_relative_entropy(left, right) + _relative_entropy(right, left)) / 2
    return np.asarray(np.clip(value, 0.0, 1.0))  # rounding may exceed the bounds by an ulp


def non_iid_degree(counts: npt.ArrayLike, reference: npt.ArrayLike) -> float:
    """D(P) of one node, or of a pooled group of nodes, relative to the mix of the reference.

        P' = Σ_k n_k P_k / Σ_k n_k,   D(P') = D_JS(P', P̄)

    A matrix holds one row of label counts per device and is pooled: D' is the degree of the cohort's rows and
    D₀ that of the server's counts, both with all devices' rows as reference.

    >>> devices = np.array([[10, 0], [0, 10], [10, 0], [0, 10]])
    >>> non_iid_degree(devices[:2], devices), round(non_iid_degree(devices[0], devices), 4)
    (0.0, 0.3113)
    """
    return float(divergence(_pooled(counts), _pooled(reference)))


@dataclass(frozen=True, eq=False)
class SplitMixes:
    """Label counts of a split and their non-IID degrees relative to the mix of all devices."""

    counts: npt.NDArray[np.int64]  # [N, C]
    degrees: Floats  # [N]
    server_counts: npt.NDArray[np.int64]  # [C]
    server_degree: float | None  # None without server images


def split_mixes(split: Split, labels: npt.NDArray[np.integer], classes: int) -> SplitMixes:
    """The label counts and degrees of a split of `labels`."""
    counts = split.counts(labels, classes)
    server = np.bincount(labels[split.server], minlength=classes)
    return SplitMixes(
        counts,
        divergence(counts, counts.sum(axis=0)),
        server,
        non_iid_degree(server, counts) if len(split.server) else None,
    )


def split_statistics(config: Config, say: Say) -> dict[str, Any]:
    """The output of `feddumap inspect data`: sizes, label counts and degrees of a configured split."""
    dataset = catalog.get(config.data, say=say)
    classes, labels, seed = len(dataset.classes), dataset.train_labels, config.run.seed
    users = dataset.train_users
    data = partition.resolve(_fitting(config.data, len(labels)), classes, labels, users, seed)
    config = config.model_copy(update={"data": data})
    split = partition.split(labels, classes, data, seed, users)
    mixes = split_mixes(split, labels, classes)
    cohort = min(config.train.cohort, data.devices)
    chosen = select(config.replace(train={"cohort": cohort}), 0)
    return {
        "data": dataset.name,
        "input": dataset.input.describe(),
        "classes": classes,
        "labels": {
            part: dict(zip(dataset.classes, np.bincount(found, minlength=classes).tolist(), strict=True))
            for part, found in (("train", labels), ("test", dataset.test_labels))
        },
        "users": _user_counts(users, dataset.users),
        "train": len(labels),
        "test": len(dataset.test_labels),
        "partition": data.partition,
        "devices": data.devices,
        "samples": {
            "min": int(split.sizes.min()),
            "max": int(split.sizes.max()),
            "total": int(split.sizes.sum()),
        },
        "degree_devices": {
            "min": float(mixes.degrees.min()),
            "mean": float(mixes.degrees.mean()),
            "max": float(mixes.degrees.max()),
            "each": [float(degree) for degree in mixes.degrees],
        },
        "degree_cohort": non_iid_degree(mixes.counts[chosen], mixes.counts),
        "server": {
            "samples": len(split.server),
            "classes": int((mixes.server_counts > 0).sum()),
            "labels": mixes.server_counts.tolist(),
            "degree": mixes.server_degree,
        },
    }


def _fitting(data: DataConfig, samples: int) -> DataConfig:
    """Fewer devices than the default if a small data set has too few samples for them."""
    few = samples // 5  # two shards for each device of four fifths of the samples, with room
    if "devices" in data.model_fields_set or data.partition == "natural" or few >= data.devices:
        return data
    return data.model_copy(update={"devices": max(1, few)})


def _user_counts(users: npt.NDArray[np.int64] | None, names: tuple[str, ...]) -> dict[str, int] | None:
    """The number of users, the range of their training samples, and the samples without a user."""
    if users is None or not len(names):
        return None
    counts = np.bincount(users[users >= 0], minlength=len(names))
    return {
        "count": len(names),
        "min": int(counts.min()),
        "max": int(counts.max()),
        "nobody": int((users < 0).sum()),
    }


def _pooled(counts: npt.ArrayLike) -> Floats:
    value = np.asarray(counts, dtype=np.float64)
    return np.asarray(value.sum(axis=0)) if value.ndim == 2 else value


def _relative_entropy(p: Floats, q: Floats) -> Floats:
    """D_KL(P ‖ ½ (P + Q)), with the ratio 2p / (p + q) because ½ (p + q) underflows before p does."""
    present = np.broadcast_to(p > 0, np.broadcast_shapes(p.shape, q.shape))
    ratio = np.divide(2 * p, p + q, out=np.ones(present.shape), where=present)
    return np.asarray((p * np.log2(ratio)).sum(axis=-1))


def _shown(value: Floats) -> str:
    return np.array2string(value, threshold=12, precision=4).replace("\n", "")
