"""What a private run guarantees, in words, from its configuration and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from feddumap.config import Config


def describe(config: Config, records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """ε after the last round and what it depends on; None for a run without [privacy]."""
    if not config.privacy.on:
        return None
    spent = [record["epsilon"] for record in records if "epsilon" in record]
    keys = ("delta", "clip", "noise", "sampling", "secret")
    target = config.privacy.epsilon
    return {
        "epsilon": spent[-1] if spent else None,
        "target": target,
        **{key: getattr(config.privacy, key) for key in keys},
        "devices": config.data.devices,
        "cohort": config.train.cohort,
    }


def statement(value: Mapping[str, Any]) -> str:
    """The guarantee in a sentence or three."""
    if value["epsilon"] is None:
        return "no round has been released yet"
    neighbours = "added or removed" if value["sampling"] == "poisson" else "replaced by another"
    sampled = (
        f"each of {value['devices']:,} devices joins a round with probability "
        f"{value['cohort'] / value['devices']:.3g}"
        if value["sampling"] == "poisson"
        else f"{value['cohort']:,} of {value['devices']:,} devices are chosen without replacement"
    )
    told = (
        f"ε = {value['epsilon']:.3g} at δ = {value['delta']:.3g} for one device's whole data, {neighbours}; "
        f"{sampled}; uploads are clipped to {value['clip']:g}, noise multiplier {value['noise']:.4g}"
    )
    if value["target"] is not None and value["epsilon"] > value["target"]:
        told += f". This is above the target privacy.epsilon = {value['target']:g}"
    if not value["secret"]:
        told += ". Noise and cohorts follow from run.seed: no protection from those who know it"
    return told
