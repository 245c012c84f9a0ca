"""A split in numbers: sizes, label mixes and non-IID degrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from feddumap.config import Config
from feddumap.core.sampling import select
from feddumap.data import partition
from feddumap.data.label_mix import divergence
from feddumap.data.sources import catalog
from feddumap.system import console


def describe_data(config: Config, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything `feddumap inspect data` prints."""
    dataset = catalog.get(config.data.name, say=say)
    classes, labels, seed = len(dataset.classes), dataset.train_labels, config.run.seed
    data = partition.resolve(config.data, classes)
    split = partition.split(labels, classes, data, seed)
    counts = split.counts(labels, classes)
    everyone = counts.sum(axis=0)
    degrees = divergence(counts, everyone)
    cohort = min(config.train.cohort, data.devices)
    chosen = select(config.replace(train={"cohort": cohort}), 0)
    server = np.bincount(labels[split.server], minlength=classes)
    return {
        "data": dataset.name,
        "classes": classes,
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
            "min": float(degrees.min()),
            "mean": float(degrees.mean()),
            "max": float(degrees.max()),
            "each": [float(degree) for degree in degrees],
        },
        "degree_cohort": float(divergence(counts[chosen].sum(axis=0), everyone)),
        "server": {
            "samples": len(split.server),
            "classes": int((server > 0).sum()),
            "labels": server.tolist(),
            "degree": float(divergence(server, everyone)) if len(split.server) else None,
        },
    }


def show(value: dict[str, Any]) -> None:
    """The overview as tables."""
    degrees, samples, server = value["degree_devices"], value["samples"], value["server"]
    rows = [
        ("training images, test images", f"{value['train']:,}, {value['test']:,}"),
        ("devices, partition", f"{value['devices']:,}, {value['partition']}"),
        ("images on a device", f"{samples['min']:,} to {samples['max']:,}, {samples['total']:,} in all"),
        ("non-IID degree of a device", "{min:.3f} to {max:.3f}, mean {mean:.3f}".format(**degrees)),
        ("non-IID degree of the first cohort", f"{value['degree_cohort']:.3f}"),
        ("images on the server", f"{server['samples']:,} of {server['classes']} classes"),
        ("non-IID degree of the server", "-" if server["degree"] is None else f"{server['degree']:.3f}"),
    ]
    console.table(f"{value['data']}, {value['classes']} classes", ("", ""), rows)
    console.out.print(
        "Degrees are base-2 Jensen-Shannon divergences from the label mix of all devices: 0 to 1."
    )
