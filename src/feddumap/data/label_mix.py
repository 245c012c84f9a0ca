"""Label mixes and how far apart they are: the non-IID degree of the paper."""

import numpy as np
import numpy.typing as npt

from feddumap.errors import FeddumapError

Floats = npt.NDArray[np.float64]


def mix(counts: npt.ArrayLike) -> Floats:
    """P(y) = n_y / Σ n_y along the last axis: a label mix from counts, or from probabilities.

    >>> mix([[1, 3], [5, 0]])
    array([[0.25, 0.75],
           [1.  , 0.  ]])
    """
    value = np.asarray(counts, dtype=np.float64)
    if value.ndim == 0 or not np.isfinite(value).all() or (value < 0).any():
        raise FeddumapError(
            f"label counts {_shown(value)}: expected finite numbers of 0 or more, one a class"
        )
    total = value.sum(axis=-1, keepdims=True)
    if (total == 0).any():
        raise FeddumapError(
            f"label counts {_shown(value)}: a node without images has no label mix; leave it out"
        )
    return np.asarray(value / total)


def divergence(p: npt.ArrayLike, q: npt.ArrayLike) -> Floats:
    """Jensen-Shannon divergence in bits, D(P) of the paper, along the last axis.

        D_JS(P, Q) = ½ D_KL(P ‖ M) + ½ D_KL(Q ‖ M),   M = ½ (P + Q)
        D_KL(P ‖ M) = Σ_y P(y) log₂(P(y) / M(y))

    Counts are normalised first, terms with P(y) = 0 are 0, and base 2 keeps the result in [0, 1]: 0 for
    equal mixes, 1 for mixes without a common class. Rows of matrices are compared row by row, and a vector
    with each row of a matrix; two vectors give an array without dimensions.

    Uniform over 2, 5 and all of 10 classes against uniform, the paper's d₁, d₂ and d₃:

    >>> rows = np.arange(10) < np.array([[2], [5], [10]])
    >>> divergence(rows, np.ones(10)).round(4)
    array([0.61  , 0.3113, 0.    ])
    >>> float(divergence([1, 0], [0, 7]))
    1.0
    """
    left, right = mix(p), mix(q)
    value = (_relative_entropy(left, right) + _relative_entropy(right, left)) / 2
    return np.asarray(np.clip(value, 0.0, 1.0))  # rounding may pass the limits by an ulp


def non_iid_degree(counts: npt.ArrayLike, reference: npt.ArrayLike) -> float:
    """D(P) of one node, or of a group taken together, against the mix of the reference.

        P' = Σ_k n_k P_k / Σ_k n_k,   D(P') = D_JS(P', P̄)

    A matrix holds one row of label counts a device and is pooled; so D' is that of the chosen devices' rows
    and D₀ that of the server's counts, both with all devices' rows as reference.

    >>> devices = np.array([[10, 0], [0, 10], [10, 0], [0, 10]])
    >>> non_iid_degree(devices[:2], devices), round(non_iid_degree(devices[0], devices), 4)
    (0.0, 0.3113)
    """
    return float(divergence(_pooled(counts), _pooled(reference)))


def _pooled(counts: npt.ArrayLike) -> Floats:
    value = np.asarray(counts, dtype=np.float64)
    return np.asarray(value.sum(axis=0)) if value.ndim == 2 else value


def _relative_entropy(p: Floats, q: Floats) -> Floats:
    """D_KL(P ‖ ½ (P + Q)); written as 2p / (p + q) because ½ (p + q) underflows before p does."""
    present = np.broadcast_to(p > 0, np.broadcast_shapes(p.shape, q.shape))
    ratio = np.divide(2 * p, p + q, out=np.ones(present.shape), where=present)
    return np.asarray((p * np.log2(ratio)).sum(axis=-1))


def _shown(value: Floats) -> str:
    return np.array2string(value, threshold=12, precision=4).replace("\n", "")
