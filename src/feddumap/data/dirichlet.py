"""Dirichlet partition: label mixes are drawn from a Dirichlet distribution, each image is on one device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from feddumap.core.rng import stream

Ints = npt.NDArray[np.int64]


def dirichlet(labels: Ints, classes: int, order: Ints, sizes: Ints, alpha: float, seed: int) -> Ints:
    """Assign each image of `order` to one device; device k has `sizes[k]` images and a mix P_k ~
    Dirichlet(α).

    The number of images per class and device is drawn first; then each class's images, in random order, are
    dealt to the devices.
    """
    rng = stream(seed, "partition", "dirichlet")
    by_class = order[np.argsort(labels[order], kind="stable")]
    available = np.bincount(labels[order], minlength=classes)
    taken = _class_counts(_log_mixes(len(sizes), classes, alpha, rng), sizes, available, rng)
    starts = np.cumsum(taken, axis=0) - taken + (np.cumsum(available) - available)
    return by_class[ranges(starts.ravel(), taken.ravel())]


def _log_mixes(devices: int, classes: int, alpha: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """log Gamma(α) variables, [N, C]: their softmax over any set of classes is Dirichlet(α) on that set.

    Gamma(α) = Gamma(α + 1) · U^(1/α), as logarithms because for α = 0.01 most values underflow.
    """
    shape = (devices, classes)
    tail = rng.standard_exponential(shape) / max(alpha, 1e-300)  # avoids overflow; such an α is 0 in effect
    return np.asarray(np.log(rng.standard_gamma(alpha + 1, shape)) - tail)


def _class_counts(
    log_mixes: npt.NDArray[np.float64], sizes: Ints, available: Ints, rng: np.random.Generator
) -> Ints:
    """Number of images of class c on device k, [N, C], with row sums `sizes` and column sums `available`.

    Every device requests its missing images by its mix over the classes that have images left; a class with
    more requests than images serves a random subset of them. Each pass finishes or empties a class, so there
    are at most C passes.
    """
    taken = np.zeros(log_mixes.shape, dtype=np.int64)
    left, missing = available.copy(), sizes.copy()
    while (rows := np.flatnonzero(missing)).size:
        columns = np.flatnonzero(left)
        chosen = log_mixes[np.ix_(rows, columns)]
        weight = np.exp(chosen - chosen.max(axis=1, keepdims=True))
        asked = rng.multinomial(missing[rows], weight / weight.sum(axis=1, keepdims=True))
        for j in np.flatnonzero(asked.sum(axis=0) > left[columns]):
            asked[:, j] = rng.multivariate_hypergeometric(asked[:, j], left[columns[j]], method="marginals")
        taken[np.ix_(rows, columns)] += asked
        left[columns] -= asked.sum(axis=0)
        missing[rows] -= asked.sum(axis=1)
    return taken


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """The ranges start, …, start + length − 1, concatenated.

    >>> ranges(np.array([5, 0, 9]), np.array([2, 0, 3]))
    array([ 5,  6,  9, 10, 11])
    """
    ends = np.cumsum(lengths)
    shift = np.repeat(starts - (ends - lengths), lengths)
    return np.asarray(np.arange(len(shift)) + shift)
