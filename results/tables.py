"""Writes the tables of docs/results.md, docs/variants.md and the README from the runs in results/runs.

    python results/tables.py            # rewrites the blocks between <!-- table: NAME --> and <!-- end -->
    python results/tables.py --check    # exits with 1 if a document differs from the runs

The paper's numbers are those of `feddumap paper`. A mean is followed by the standard deviation over seeds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial

from comparisons import against_alone, baselines, comparison, costs, course, differences, headline
from finished import RESULTS
from trials import ablations, digits, large_networks, missing, trials

DOCUMENTS = tuple(RESULTS.parent / path for path in ("docs/results.md", "docs/variants.md", "README.md"))

BLOCKS: dict[str, Callable[[], str]] = {
    "headline-lenet": partial(headline, "cifar10", "lenet"),
    "headline-cnn": partial(headline, "cifar10", "cnn"),
    "cifar10-lenet": partial(comparison, "cifar10", "lenet"),
    "cifar10-lenet-baselines": partial(baselines, "cifar10", "lenet"),
    "cifar10-lenet-costs": partial(costs, "cifar10", "lenet"),
    "cifar10-lenet-differences": partial(differences, "cifar10", "lenet"),
    "cifar10-cnn": partial(comparison, "cifar10", "cnn"),
    "cifar10-cnn-costs": partial(costs, "cifar10", "cnn"),
    "cifar10-cnn-differences": partial(differences, "cifar10", "cnn"),
    "cifar10-lenet-course": partial(course, "cifar10", "lenet"),
    "cifar10-cnn-course": partial(course, "cifar10", "cnn"),
    "cifar100-lenet-course": partial(course, "cifar100", "lenet"),
    "cifar100-cnn-course": partial(course, "cifar100", "cnn"),
    "cifar100-lenet-costs": partial(costs, "cifar100", "lenet"),
    "cifar100-cnn-costs": partial(costs, "cifar100", "cnn"),
    "cifar100-cnn-differences": partial(differences, "cifar100", "cnn"),
    "cifar100-lenet-differences": partial(differences, "cifar100", "lenet"),
    "against-alone": against_alone,
    "cifar100-lenet": partial(comparison, "cifar100", "lenet"),
    "cifar100-cnn": partial(comparison, "cifar100", "cnn"),
    "ablations": ablations,
    "large-networks": large_networks,
    "full-participation": partial(digits, "full-participation"),
    "classes-per-device": partial(digits, "classes-per-device"),
    "shared-samples": partial(digits, "shared-samples"),
    "variant": partial(trials, "variant"),
    "cifar100-variant": partial(trials, "cifar100-variant"),
    "missing": missing,
}


def filled(text: str) -> str:
    """The document with its tables written anew."""

    def block(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n\n{BLOCKS[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->.*?<!-- end -->", block, text, flags=re.DOTALL)


def main() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        new = filled(text)
        if "--check" in sys.argv and new != text:
            sys.exit(f"{document} differs from the runs: run python results/tables.py")
        document.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
