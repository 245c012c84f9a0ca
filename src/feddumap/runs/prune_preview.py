"""`feddumap inspect prune`: what a run's method would remove from its newest checkpoint. Changes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from feddumap.config import Config
from feddumap.core.messages import Question, ServerState
from feddumap.core.sampling import select
from feddumap.data.partition import Split
from feddumap.data.sources import catalog
from feddumap.errors import FeddumapError
from feddumap.methods import registry, signature
from feddumap.methods.fedap import Pruning, adaptive_rates, chosen_layers, remove
from feddumap.methods.hrank import Uniform
from feddumap.models import layer_widths
from feddumap.pruning.dependency_graph import prunable
from feddumap.pruning.ranks import unit_ranks
from feddumap.pruning.rates import node_rate
from feddumap.runs import integrity
from feddumap.runs.reader import read_config
from feddumap.system import console
from feddumap.system.callbacks import Progress, Say, ignore
from feddumap.system.determinism import deterministic
from feddumap.training.backends import make_model
from feddumap.training.samples import Samples


def preview(path: Path, rate: float | None, say: Say, progress: Progress = ignore) -> dict[str, Any]:
    """What a pruning would remove now, by layer, and why other layers are left; `rate` replaces p*."""
    config = read_config(path)
    settings = _settings(config)
    state = integrity.newest(path, say).state
    server, device = _samples(path, config, state.round, say)
    with deterministic():
        layers = chosen_layers(state.architecture, settings)
        if rate is not None:
            total, source = rate, "--rate"
        else:
            total, source = _rate(settings, state, config, server, progress)
        threshold: float | None = None
        rates = {layer.leader: total for layer in layers}
        if isinstance(settings, Pruning):
            threshold, rates = adaptive_rates(state, layers, total)
        samples = server if len(server) else device
        kernels = config.train.kernels
        ranks = unit_ranks(
            state.architecture, state.weights, kernels, layers, samples, partial(progress, "feature ranks")
        )
        _, told = remove(state, rates, ranks, settings)
    found = prunable(state.architecture, settings.units)
    left_out = found.left_out(coupled=settings.coupled, keep=settings.keep)
    shared = {layer.leader: list(layer.members[1:]) for layer in layers if layer.members[1:]}
    widths = layer_widths(state.architecture)
    return {
        "run": str(path),
        "method": config.method.name,
        "round": state.round,
        "prune_round": settings.prune_round,
        "rate": total,
        "rate_from": source,
        "threshold": threshold,
        **{key: told[key] for key in ("layers", "parameters", "macs")},
        "shared": shared,
        "left_out": {name: {"filters": widths[name], "reason": why} for name, why in left_out.items()},
    }


def _settings(config: Config) -> Pruning | Uniform:
    resolved = registry.resolve(config.method)
    given = signature.arguments(registry.find(resolved.name).build, resolved.settings)
    for group in given.values():
        if isinstance(group, Pruning | Uniform):
            return group
    raise FeddumapError(
        f"method.name = {config.method.name!r} removes no filters or units: give a run of fedap, fedduap, "
        "feddumap or hrank"
    )


def _samples(path: Path, config: Config, number: int, say: Say) -> tuple[Samples, Samples]:
    """The samples of the server, and of the device that ranks units for a server without any."""
    dataset = catalog.get(config.data, say=say, say_cached=ignore)
    split = Split.from_arrays(integrity.read_split(path)[0], len(dataset.train_labels))
    chosen = split.server, split.device((select(config, number) or [0])[0])
    server, device = (Samples.take(dataset.train_inputs, dataset.train_labels, index) for index in chosen)
    return server, device


def _rate(
    settings: Pruning | Uniform, state: ServerState, config: Config, server: Samples, progress: Progress
) -> tuple[float, str]:
    """The rate, and where it comes from."""
    if isinstance(settings, Uniform):
        return settings.prune_rate, "method.prune_rate"
    if settings.rate == "fixed":
        assert settings.fixed_rate is not None
        return settings.fixed_rate, "method.fixed_rate"
    if not len(server):
        raise FeddumapError(
            f"method.rate = {settings.rate!r} finds the rate from data, and the server has none: give --rate"
        )
    model = make_model(state.architecture, state.weights, config.train.kernels)
    question = Question("rate", {"mode": settings.rate, "max_rate": settings.max_rate})
    name = ("server", state.round)
    steps = partial(progress, "curvature on the server's data")
    own = node_rate(model, state.architecture, server, question, config.run.seed, name, steps)
    average = "" if settings.rate_nodes == "server" else "; a run averages it with those of devices"
    return own.p, f"the server's data alone{average}"


def show(value: dict[str, Any]) -> None:
    """Print the preview as tables."""
    after, planned = (console.plural(value[key], "round") for key in ("round", "prune_round"))
    text = f"Pruning after {after} at the rate {value['rate']:.3f} (from {value['rate_from']})"
    if value["threshold"] is not None:
        text += f", threshold {value['threshold']:.4g}"
    console.out.print(f"{text}. The run prunes after {planned}.", markup=False)
    rows = [
        (
            name,
            layer["filters"],
            layer["kept"],
            f"{layer['rate']:.3f}",
            ", ".join(value["shared"].get(name, [])),
        )
        for name, layer in value["layers"].items()
    ]
    console.table("Would be cut", ("layer", "units", "kept", "rate", "with it"), rows)
    if value["left_out"]:
        left = [(name, layer["filters"], layer["reason"]) for name, layer in value["left_out"].items()]
        console.table("Left as they are", ("layer", "units", "reason"), left)
    costs = [
        (what, f"{value[key]['before']:,}", f"{value[key]['after']:,}", _change(value[key]))
        for what, key in (("parameters", "parameters"), ("multiply-adds", "macs"))
    ]
    console.table("Cost before and after", ("", "before", "after", "change"), costs)


def _change(cost: dict[str, int]) -> str:
    return f"{cost['after'] / cost['before'] - 1:+.1%}"
