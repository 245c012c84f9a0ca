"""The configuration: sections, keys, defaults (the paper's values) and the errors about them.

The field descriptions are the command line's help. A method's own keys are the parameters of its recipe
(`feddumap.methods`), so this file does not know them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from feddumap.errors import FeddumapError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class DataConfig(Section):
    """What is learned from, and who holds it."""

    name: str = Field("digits", description="digits, cifar10, cifar100, or the path of an .npz file")
    devices: Count = Field(100, description="number of devices in the federation")
    partition: Literal["shards", "iid", "dirichlet"] = Field(
        "shards", description="how the devices' images are split: by label shards, at random, or Dirichlet"
    )
    shards_per_device: Count | None = Field(
        None, description="label shards a device holds; default classes / 5: 2 for 10 classes, 20 for 100"
    )
    alpha: Positive = Field(0.5, description="Dirichlet concentration; small is far from IID")
    size_spread: Annotated[float, Field(ge=0, le=3)] = Field(
        0.0, description="spread (log-normal sigma) of the devices' sizes with iid and dirichlet; 0 is equal"
    )
    server_fraction: Share = Field(0.1, description="server images as a fraction p of all device images")
    server_classes: Count | None = Field(
        None, description="classes the server's images come from; default half of them"
    )
    validation: Annotated[int, Field(ge=0)] = Field(
        0,
        description="images of the server's classes that nobody trains on; every evaluation scores the model "
        "on them too",
    )
    augment: bool = Field(True, description="random crop (pad 4) and horizontal flip while training")


class ModelConfig(Section):
    """The network."""

    name: str = Field("cnn", description="cnn, lenet, vgg11 or resnet18")
    weights: str | None = Field(
        None, description="safetensors file with the weights to start from; default the network's own"
    )


class MethodConfig(Section):
    """The method and its own keys (`feddumap methods` lists both)."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = Field("fedavg", description="a name that `feddumap methods` lists")

    @property
    def settings(self) -> dict[str, Any]:
        """The method's own keys."""
        return dict(self.model_extra or {})


class TrainConfig(Section):
    """Rounds and local training."""

    rounds: Count = Field(500, description="rounds to train")
    cohort: Count = Field(10, description="devices chosen in each round")
    epochs: Count = Field(5, description="local epochs E")
    batch: Count = Field(10, description="local batch size B")
    lr: Positive = Field(0.1, description="learning rate of round 0")
    lr_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        0.99, description="factor on the learning rate, each round"
    )
    calibration: Annotated[float, Field(ge=0, le=10)] = Field(
        0.0,
        description="τ: while a node trains, τ · log of its label frequencies is added to its outputs; 0 is "
        "the plain loss, 1 the balanced softmax",
    )
    kernels: Literal["c", "torch"] | None = Field(
        None,
        description="what computes gradients: the kernels in C (plain chains on a CPU), or torch; default "
        "c where it can",
    )


class ClockConfig(Section):
    """The virtual clock: how long a round would last on real devices."""

    profile: Literal["paper", "general"] = Field(
        "paper", description="the paper's formula, or a fleet in which every device has its own speed"
    )
    train_seconds: Positive | None = Field(
        None, description="paper: seconds to train the unpruned model for a round; default per model"
    )
    macs_per_second: Positive = Field(
        1e10, description="general: median device speed, multiply-adds a second"
    )
    down_mbit: Positive = Field(50.0, description="general: median download, Mbit/s")
    up_mbit: Positive = Field(20.0, description="general: median upload, Mbit/s")
    spread: Annotated[float, Field(ge=0, le=3)] = Field(
        0.5, description="general: log-normal sigma of speeds and links among devices; 0 is all alike"
    )
    fleet: str | None = Field(
        None, description="general: CSV with columns device, macs_per_second, down_mbit, up_mbit, instead"
    )
    deadline: Positive | None = Field(
        None, description="general: seconds after which a round goes on without its stragglers"
    )


class RunConfig(Section):
    """How the run is carried out; nothing here but the seed changes a result, if no message is lost."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(777, description="names every random stream")
    workers: Annotated[int, Field(ge=0)] = Field(
        0, description="worker processes, one thread each; 0 is one per core, 1 trains in this process"
    )
    evaluate_every: Count = Field(1, description="rounds between two evaluations on the test images")
    checkpoint_every: Count = Field(1, description="rounds between two checkpoints")
    target: Share | None = Field(None, description="stop when the smoothed test accuracy reaches this")
    targets: list[Share] = Field([], description="accuracies whose round and clock the summary reports")
    device: str = Field("cpu", description="cpu, or cuda (one process)")
    tensorboard: bool = Field(False, description="also write TensorBoard event files, in the run directory")
    engine: Literal["local", "ray", "flower"] = Field(
        "local",
        description="where devices are: processes here, Flower's simulation by Ray, or Flower's nodes",
    )
    timeout: Positive = Field(600.0, description="flower, ray: seconds a device has to answer a message")
    least_share: Share = Field(
        0.5, description="flower, ray: share of a round's devices that must answer; with fewer it is repeated"
    )


RUNTIME_KEYS = ("workers", "tensorboard", "engine", "timeout", "least_share")
"""The keys of [run] that say how a run is carried out, not which run it is: resuming may change them."""


class Config(Section):
    """A run, completely."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    train: TrainConfig = TrainConfig()
    clock: ClockConfig = ClockConfig()
    run: RunConfig = RunConfig()

    @staticmethod
    def parse(value: Mapping[str, Any]) -> Config:
        """A configuration from nested mappings; every mistake is a sentence about a key."""
        try:
            return Config.model_validate(value)
        except ValidationError as error:
            raise FeddumapError("; ".join(explain(detail) for detail in error.errors())) from None

    def replace(self, **sections: Mapping[str, Any]) -> Config:
        """A copy with some keys of some sections set: `config.replace(train={"rounds": 3})`."""
        value = self.model_dump()
        for section, keys in sections.items():
            value.setdefault(section, {}).update(keys)
        return Config.parse(value)

    def to_toml(self) -> dict[str, Any]:
        """Nested mappings without the unset keys, as TOML has no null."""
        return self.model_dump(exclude_none=True)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a TOML file; one that cannot be read is called what it is."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FeddumapError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise FeddumapError(f"cannot read the {what} {path}: {error.strerror}") from None


def load(path: Path | None, sets: Iterable[str] = ()) -> Config:
    """Read a TOML file (or start from the defaults) and apply `section.key=value` settings in order."""
    value = read_toml(path, "configuration") if path is not None else {}
    for text in sets:
        name, equals, raw = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            raise FeddumapError(f"--set {text!r}: expected section.key=value, such as train.rounds=20")
        table = value.setdefault(section, {})
        if not isinstance(table, dict):
            raise FeddumapError(f"{section} = {table!r}: expected a section, such as [{section}]")
        table[key] = _toml_value(raw.strip())
    return Config.parse(value)


def _toml_value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw  # a bare word is a string: --set model.name=lenet


def explain(detail: ErrorDetails, prefix: str = "") -> str:
    """One pydantic error as one sentence that names the key, the value and what was expected."""
    path = [str(part) for part in detail["loc"]]
    key = prefix + ".".join(path)
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        allowed = _allowed(path[:-1])
        near = get_close_matches(path[-1], allowed, n=1)
        hint = f"did you mean {prefix}{'.'.join([*path[:-1], near[0]])}? " if near else ""
        kind = "section" if len(path) == 1 and not prefix else "key"
        return f"unknown {kind} {key}: {hint}Allowed: {', '.join(allowed)}"
    message = detail["msg"]
    value = detail["input"]
    return f"{key} = {value!r}: {message[0].lower()}{message[1:]}"


def _allowed(path: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in path:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type)
        model = annotation
    return list(model.model_fields)


def describe() -> list[tuple[str, str, str, str]]:
    """Every key as (section.key, allowed values, default, description): the command line's help."""
    rows = []
    for section, field in Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        for key, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True)
            shown = (
                "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            )
            rows.append((f"{section}.{key}", type_name(info.annotation), shown, info.description or ""))
    return rows


def type_name(annotation: Any) -> str:
    """A short word for a field's type.

    >>> type_name(int), type_name(Literal["a", "b"]), type_name(float | None)
    ('int', 'a | b', 'float')
    """
    arguments = getattr(annotation, "__args__", ())
    metadata = getattr(annotation, "__metadata__", None)
    if metadata is not None:
        return type_name(annotation.__origin__)
    if arguments and getattr(annotation, "__origin__", None) is list:
        return f"list of {type_name(arguments[0])}"
    if arguments and all(isinstance(argument, str) for argument in arguments):
        return " | ".join(arguments)
    if arguments:
        return " | ".join(type_name(argument) for argument in arguments if argument is not type(None))
    return {"str": "text"}.get(getattr(annotation, "__name__", ""), getattr(annotation, "__name__", ""))
