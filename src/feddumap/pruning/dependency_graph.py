"""The layers of a network that can be pruned, tried out, and the choice among them by the settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

from feddumap.core.messages import Architecture
from feddumap.errors import FeddumapError
from feddumap.models import layer_widths
from feddumap.models.registry import is_builtin
from feddumap.pruning.structure import PrunableLayer, Units, candidates
from feddumap.pruning.verification import verified
from feddumap.system.determinism import deterministic


@dataclass(frozen=True)
class PrunableLayers:
    """The layers of a network that can be pruned, and the reasons why others cannot."""

    architecture: Architecture
    units: Units
    layers: tuple[PrunableLayer, ...]
    refused: dict[str, str] = field(default_factory=dict)

    def choose(self, *, coupled: bool, keep: Sequence[str] = ()) -> tuple[PrunableLayer, ...]:
        """The layers that stand alone and, with `coupled`, those that share units, without the layers whose
        names match a pattern of `keep`."""
        left_out = self.left_out(coupled=coupled, keep=keep)
        chosen = tuple(layer for layer in self.layers if layer.leader not in left_out)
        if not chosen:
            raise FeddumapError(self._nothing(left_out))
        return chosen

    def left_out(self, *, coupled: bool, keep: Sequence[str] = ()) -> dict[str, str]:
        """Why layers are not pruned: refused, or left out by the settings. In the order of definition."""
        reasons = dict(self.refused)
        known = layer_widths(self.architecture)
        for pattern in keep:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise FeddumapError(
                    f"method.keep has the pattern {pattern!r}, which matches no layer: expected one of "
                    f"{', '.join(known)}, or a pattern such as 'head.*'"
                )
        for layer in self.layers:
            names = (*layer.members, *layer.followers)
            kept = [name for name in names if any(fnmatchcase(name, pattern) for pattern in keep)]
            if kept:
                reasons.update(dict.fromkeys(names, f"method.keep names {', '.join(kept)}"))
            elif len(layer.members) > 1 and not coupled:
                reasons.update(dict.fromkeys(layer.members, f"{_show(layer.members)} share channels"))
        return {name: reasons[name] for name in known if name in reasons}

    def _nothing(self, left_out: dict[str, str]) -> str:
        what = "convolution" if self.units == "filters" else "layer"
        by_reason: dict[str, list[str]] = {}
        for name, reason in left_out.items():
            by_reason.setdefault(reason, []).append(name)
        reasons = "; ".join(f"{_show(names)}: {reason}" for reason, names in by_reason.items())
        remedies = "".join(f", or set {remedy}" for remedy in self._remedies())
        return (
            f"no {what} of this network can be pruned ({reasons or 'it has none'}); use a method without "
            f"pruning{remedies}"
        )

    def _remedies(self) -> Iterator[str]:
        if any(len(layer.members) > 1 for layer in self.layers):
            yield "method.coupled=true to prune those that share channels"
        if self.units == "filters":
            linear = [layer for layer in prunable(self.architecture, "all").layers if layer.linear]
            if linear:
                yield f"method.units=all to cut hidden units of {_show([layer.leader for layer in linear])}"


@lru_cache(maxsize=8)
def prunable(architecture: Architecture, units: Units = "filters") -> PrunableLayers:
    """The prunable layers of an architecture. Cuts of a user's network are tried out; those of built-in
    networks are not, which tests do for every width."""
    with deterministic():  # one thread: the networks are small, and threads would wait for each other
        found = candidates(architecture, units)
        if not is_builtin(architecture.family):
            found = verified(architecture, found)
    return PrunableLayers(architecture, units, found.layers, found.refused)


def _show(names: Sequence[str]) -> str:
    return ", ".join(names)
