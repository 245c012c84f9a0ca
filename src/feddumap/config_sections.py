"""The sections of the configuration: keys, defaults (those of the paper) and what each key accepts.

The field descriptions are the help of the command line. The keys of a method are defined with it in
`feddumap.methods`, not here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

LARGEST = 1e30  # of a number, so that it can be computed with in float32
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]

PARTITIONS = ("shards", "iid", "dirichlet", "natural")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class DataConfig(Section):
    """The dataset, how it is read, and its partition among the devices and the server."""

    name: str = Field(
        "digits",
        description="digits, cifar10, cifar100; the path of an .npz, .parquet or .csv file or of a folder of "
        "class folders; hub:NAME; module:function; or a name of another package",
    )
    kind: Literal["image", "numbers", "tokens"] | None = Field(
        None, description="what an input is; default by the type of the stored numbers"
    )
    input: str | list[str] | None = Field(
        None, description="tables, hub: the input's column or columns; default all but label and user"
    )
    label: str | None = Field(None, description="tables, hub: the label's column; default label")
    user: str | None = Field(None, description="tables, hub: the column that says whose a sample is")
    size: int | list[int] | None = Field(
        None, description="images of folders, tables, hub: resize to this side, or to [height, width]"
    )
    length: Count | None = Field(
        None, description="tokens: cut or pad to this length; default 256 for text, else equal lengths"
    )
    vocabulary: Count | None = Field(
        None, description="tokens: their number; default the largest token of the data set and one"
    )
    test: str | None = Field(None, description="the path of the test part, in the same format")
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="share of the samples drawn as the test part if there is none; default 0.2"
    )
    mean: list[Finite] | None = Field(None, description="subtracted from the input, per channel")
    std: list[Positive] | None = Field(None, description="divides the input then, per channel")
    crop: Annotated[int, Field(ge=0)] | None = Field(
        None, description="augment: pixels of the random shift; default an eighth of the shorter side"
    )
    flip: bool | None = Field(
        None, description="augment: mirror at random; default false for data sets of your own"
    )
    devices: Count = Field(
        100, description="number of devices in the federation; with natural, default the number of users"
    )
    partition: str = Field(
        "shards",
        description="how the devices' samples are split: by label shards, at random (iid), dirichlet, by the "
        "user of each sample (natural), or flwr:CLASS, a partitioner of flwr-datasets",
    )
    partitioner: dict[str, Any] | None = Field(None, description="flwr: keyword arguments of the partitioner")
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
        description="held-out images of the server's classes, on which every evaluation scores the model",
    )
    augment: bool = Field(True, description="random crop and flip of images while training")

    @field_validator("name", "test")
    @classmethod
    def _a_name(cls, value: str | None) -> str | None:
        if value is None or (value and "\0" not in value):
            return value
        raise ValueError("expected a name or a path")

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, value: str) -> str:
        if value in PARTITIONS or re.fullmatch(r"flwr:[A-Za-z]\w*", value):
            return value
        raise ValueError(f"expected {', '.join(PARTITIONS)} or flwr:CLASS, a partitioner of flwr-datasets")

    @field_validator("size", mode="before")
    @classmethod
    def _one_or_two_sides(cls, value: Any) -> Any:
        sides = value if isinstance(value, list) and len(value) == 2 else [value]
        if value is None or all(type(side) is int and 0 < side < 2**15 for side in sides):
            return value
        raise ValueError("expected a number of pixels, or [height, width]")


class ModelConfig(Section):
    """The model. Further keys are keyword arguments of the factory of a network of the user's own."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())

    name: str = Field(
        "cnn",
        description="cnn, lenet, vgg11, resnet18, mlp, module:factory, torchvision:NAME or timm:NAME",
    )
    weights: str | None = Field(
        None,
        description="safetensors file with the initial weights; default the network's initialization",
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of the factory."""
        return dict(self.model_extra or {})


class MethodConfig(Section):
    """The method and its keys (`feddumap methods` lists methods, `feddumap methods NAME` the keys of one)."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = Field("fedavg", description="a name that `feddumap methods` lists")

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of the method."""
        return dict(self.model_extra or {})


class TrainConfig(Section):
    """Rounds and local training."""

    rounds: Count = Field(500, description="rounds to train")
    cohort: Count = Field(10, description="devices chosen in each round")
    epochs: Count = Field(5, description="local epochs E")
    batch: Count = Field(10, description="local batch size B")
    lr: Positive = Field(0.1, description="learning rate of round 0")
    lr_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        0.99, description="factor on the learning rate per round"
    )
    calibration: Annotated[float, Field(ge=0, le=10)] | None = Field(
        None,
        description="τ: while a node trains, τ · log of its label frequencies is added to its outputs; 0 is "
        "the plain loss, 1 the balanced softmax; default 0, and 1 for feddumap-c "
        "and feddumap-cs",
    )
    kernels: Literal["c", "torch"] | None = Field(
        None,
        description="what computes gradients: the kernels in C (plain chains on a CPU), or torch; default "
        "c where supported",
    )


class ClockConfig(Section):
    """The virtual clock: the estimated duration of a round on real devices."""

    profile: Literal["paper", "general"] | None = Field(
        None,
        description="the paper's formula, or a fleet in which every device has its own speed; default paper "
        "for the paper's networks and with clock.train_seconds, else general",
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
        0.5,
        description="general: log-normal sigma of speeds and links; 0 for identical devices",
    )
    fleet: str | None = Field(
        None,
        description="general: CSV file with columns device, macs_per_second, down_mbit, up_mbit",
    )
    deadline: Positive | None = Field(
        None, description="general: seconds after which a round continues without its stragglers"
    )


class AggregateConfig(Section):
    """How uploads become one model: the weighted mean, or a rule that tolerates hostile devices."""

    name: Literal[
        "mean", "clipped", "median", "trimmed", "krum", "multi-krum", "geometric-median", "trust"
    ] = Field("mean", description="the rule; all but mean tolerate some hostile devices")
    multiple: Positive = Field(
        2.0,
        description="clipped, trust: largest norm of an update, as a multiple of the median of recent rounds",
    )
    trim: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.2, description="trimmed: share of the values that is left out at either end"
    )
    hostile: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.2, description="krum, multi-krum: share of a round's devices that may be hostile"
    )
    iterations: Count = Field(100, description="geometric-median: steps of Weiszfeld's algorithm, at most")
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.25,
        description="trust: how much training may raise the loss on server images of a device's classes",
    )


class AttackConfig(Section):
    """Simulated hostile devices, to try a defence."""

    name: Literal["none", "label-flip", "sign-flip", "scaling", "noise", "backdoor"] = Field(
        "none", description="what hostile devices do to their labels, to their update or to their images"
    )
    share: Share = Field(0.2, description="share of all devices that are hostile")
    scale: Positive = Field(
        5.0, description="sign-flip, scaling, noise, backdoor: size of the false update relative to the true"
    )
    target: Annotated[int, Field(ge=0)] = Field(
        0, description="backdoor: the class that images with the trigger are to get, from 0"
    )
    trigger: Count = Field(3, description="backdoor: side of the trigger, a square of white pixels")


class PrivacyConfig(Section):
    """Device-level differential privacy of the models of all rounds; off unless privacy.clip is set."""

    clip: Positive | None = Field(
        None, description="S: norm to which a device's whole upload is clipped; without it privacy is off"
    )
    noise: Annotated[float, Field(ge=1e-12, le=1e6)] | None = Field(
        None, description="z: noise of standard deviation z·S is added to the sum of a round's uploads"
    )
    epsilon: Positive | None = Field(
        None, description="ε of the whole run, from which the noise follows if privacy.noise is not set"
    )
    delta: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="δ at which ε is stated; default 1e-5, or devices^-1.1 if that is less"
    )
    sampling: Literal["poisson", "fixed"] = Field(
        "poisson",
        description="each device joins a round with probability cohort/devices, or exactly cohort of them",
    )
    secret: bool = Field(
        True,
        description="draw noise and cohorts from a secret key of the run; false: from run.seed, repeatable, "
        "and not private from those who know the seed",
    )
    label_clip: Positive = Field(
        100.0,
        description="norm to which a device's label counts are clipped, where a method uses them",
    )
    rate_noise: Positive = Field(
        10.0, description="standard deviation of the noise on the sum of the devices' pruning rates"
    )

    @property
    def on(self) -> bool:
        """Whether the run is differentially private."""
        return self.clip is not None

    @model_validator(mode="after")
    def _complete(self) -> PrivacyConfig:
        if self.on and self.noise is None and self.epsilon is None:
            raise ValueError("set privacy.noise, or privacy.epsilon, from which the noise follows")
        if not self.on and (self.noise or self.epsilon):
            raise ValueError("set privacy.clip, the norm to which uploads are clipped, too")
        return self


class RunConfig(Section):
    """Execution of the run; of these keys only the seed changes results, unless messages are lost."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(777, description="seed of every random stream")
    workers: Annotated[int, Field(ge=0)] = Field(
        0, description="worker processes, one thread each; 0 is one per core, 1 trains in this process"
    )
    evaluate_every: Count = Field(1, description="rounds between two evaluations on the test images")
    checkpoint_every: Count = Field(1, description="rounds between two checkpoints")
    target: Share | None = Field(None, description="stop when the smoothed test accuracy reaches this")
    targets: list[Share] = Field([], description="accuracies for which the summary reports round and clock")
    device: str = Field("cpu", description="cpu, or cuda (one process)")
    tensorboard: bool = Field(False, description="also write TensorBoard event files, in the run directory")
    wandb: bool = Field(
        False, description="also log to Weights & Biases (WANDB_MODE=offline: on this machine)"
    )
    mlflow: bool = Field(
        False, description="also log to MLflow: to MLFLOW_TRACKING_URI, or else in the run directory"
    )
    engine: Literal["local", "ray", "flower"] = Field(
        "local",
        description="where devices run: local processes, Flower's simulation with Ray, or Flower nodes",
    )
    timeout: Positive = Field(600.0, description="flower, ray: timeout of a device's answer in seconds")
    least_share: Share = Field(
        0.5,
        description="flower, ray: share of the devices that must be there at the start, and of a round's "
        "devices that must answer; with fewer they are asked again",
    )
    most_samples: Count = Field(
        100_000, description="flower, ray: samples that a device with data of its own may have at most"
    )
    secure: bool = Field(
        False, description="flower: secure aggregation (SecAgg+), for methods that need only the mean"
    )


RUNTIME_KEYS = (
    *("workers", "tensorboard", "wandb", "mlflow"),
    *("engine", "timeout", "least_share", "most_samples"),
)
"""The keys of [run] that affect execution but not results: resuming may change them."""
