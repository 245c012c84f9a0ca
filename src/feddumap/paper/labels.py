"""Labels of runs and claims in tables."""

from __future__ import annotations

from feddumap.paper.item import Item, Selector
from feddumap.paper.results import Finding, Measured

NAMES = {"cnn": "CNN", "vgg11": "VGG", "lenet": "LeNet", "resnet18": "ResNet"}
NAMES |= {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
SYMBOLS = {
    "data.server_fraction": "p",
    "data.server_classes": "classes",
    "method.effective_steps": "τ_eff",
    "method.accuracy_weight": "f'(acc)",
    "method.c": "C",
    "method.prune_rate": "rate",
}
SENTENCES = {
    "accuracy": "accuracy of {} above {}",
    "faster": "{} faster than {} to {}",
    "slower": "{} slower than {} to {}",
    "longer": "{} takes longer in all than {}",
    "less compute": "{} computes less than {}",
    "more compute": "{} computes more than {}",
    "smaller": "{} has fewer parameters than {}",
}


def place(ours: Measured) -> str:
    """The model and data set of some runs."""
    model, data = (str(ours.values[key]) for key in ("model.name", "data.name"))
    return f"{NAMES.get(model, model)} on {NAMES.get(data, data)}"


def largest_in(one: Finding) -> str:
    """The runs with the largest difference, if there are several pairs."""
    if one.pairs < 2:
        return ""
    return "mean of all" if one.largest is None else keys(one.largest, with_names=True)


def sentence(item: Item, one: Finding) -> str:
    """A claim in words."""
    targets = {one.claim.target} if one.claim.target is not None else set(item.targets.values())
    target = " or ".join(f"{target:g}" for target in sorted(targets) if target is not None)
    return SENTENCES[one.claim.measure].format(_words(one.claim.of), _words(one.reference.where), target)


def _words(where: Selector) -> str:
    parts = []
    for key, value in where.items():
        values = value if isinstance(value, list) else [value]
        text = " or ".join(NAMES.get(str(each), str(each)) for each in values)
        parts.append(f"{SYMBOLS[key]} {text}" if key in SYMBOLS else text)
    return ", ".join(parts)


def keys(ours: Measured, with_names: bool = False) -> str:
    """The swept keys of some runs, with their symbols."""
    parts = [NAMES.get(ours.model, ours.model)] if with_names else []
    parts += [f"{SYMBOLS[key]} {value}" for key, value in ours.swept.items() if key in SYMBOLS]
    return ", ".join(parts)
