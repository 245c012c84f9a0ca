"""Simulated hostile devices: `[attack]` changes what some devices train on, or what they upload.

Which devices are hostile follows from the seed, so workers and nodes agree about it. What a hostile device
answers to questions (its number of samples, its labels, its pruning rate) stays true.
"""

from __future__ import annotations

from dataclasses import replace

from feddumap.attacks.samples import flip_labels, plant_trigger
from feddumap.attacks.updates import LIES, Lie
from feddumap.config import AttackConfig, Config
from feddumap.core.algorithm import Algorithm, Plan
from feddumap.core.messages import Architecture, Upload
from feddumap.core.rng import stream
from feddumap.device.task import Task
from feddumap.errors import FeddumapError
from feddumap.training.samples import Samples


def hostile_devices(config: Config) -> frozenset[int]:
    """The hostile devices: `attack.share` of all, rounded."""
    attack, devices = config.attack, config.data.devices
    if attack.name == "none":
        return frozenset()
    chosen = stream(config.run.seed, "hostile").choice(devices, round(attack.share * devices), replace=False)
    return frozenset(chosen.tolist())


def of(config: Config, algorithm: Algorithm) -> Algorithm:
    """The algorithm with the hostile devices that the configuration asks for."""
    if config.attack.name == "none":
        return algorithm
    attack, hostile = config.attack, hostile_devices(config)
    lie = LIES.get(attack.name)

    def device_data(task: Task) -> Samples:
        samples = algorithm.device_data(task)
        if task.device not in hostile:
            return samples
        if attack.name == "label-flip":
            return flip_labels(samples, task.broadcast.architecture.classes)
        if attack.name == "backdoor":
            return plant_trigger(samples, attack, task.rng("backdoor"))
        return samples

    def local(task: Task, samples: Samples) -> Plan | Upload:
        told = algorithm.local(task, samples)
        if task.device not in hostile or lie is None:
            return told
        if isinstance(told, Upload):
            return _false(lie, task, told, attack)
        plan: Plan = told
        return replace(plan, report=lambda steps: _false(lie, task, plan.report(steps), attack))

    def check(architecture: Architecture) -> None:
        algorithm.check(architecture)
        check_attack(config, architecture)

    return replace(algorithm, device_data=device_data, local=local, check=check)


def check_attack(config: Config, architecture: Architecture) -> None:
    """Raise an error for an attack that cannot be made."""
    attack, given = config.attack, architecture.input
    if not hostile_devices(config):
        raise FeddumapError(
            f"attack.share = {attack.share:g} of data.devices = {config.data.devices} is no device: raise "
            'it, or set attack.name = "none"'
        )
    if attack.name != "backdoor":
        return
    if given.kind != "image":
        raise FeddumapError(
            f"attack.name = 'backdoor' needs images, but the inputs are {given.describe()}: its trigger is a "
            "square of pixels; choose another attack"
        )
    if attack.target >= architecture.classes:
        raise FeddumapError(
            f"attack.target = {attack.target} is no class: expected 0 to {architecture.classes - 1}"
        )
    if attack.trigger > min(given.shape[1:]):
        raise FeddumapError(f"attack.trigger = {attack.trigger} is larger than an {given.describe()}")


def _false(lie: Lie, task: Task, upload: Upload, attack: AttackConfig) -> Upload:
    rng = task.rng("attack")
    weights = lie(upload.weights, task.broadcast.weights, attack.scale, rng)
    return replace(upload, weights=weights, extra=lie(upload.extra, {}, attack.scale, rng))
