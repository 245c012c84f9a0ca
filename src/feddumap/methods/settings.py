"""The keys of `[method]`, in groups that belong together: a recipe takes the groups it has a use for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from feddumap.methods.registry import Settings

Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(ge=0, le=1)]


class LabelMix(Settings):
    label_mix: Annotated[
        Literal["counts", "gradient"],
        Field(description="what a device tells of its labels: counts, or one gradient they follow from"),
    ] = "counts"


class DynamicUpdate(LabelMix):
    c: Annotated[float, Field(ge=0, allow_inf_nan=False, description="C, the scale of the server's part")] = (
        1.0
    )
    decay: Annotated[
        Annotated[float, Field(gt=0, le=1)] | Literal["held-out"],
        Field(description="factor on the server's part, each round; or chosen on held-out server images"),
    ] = 0.999
    accuracy_weight: Annotated[
        Literal["one_minus", "inverse"], Field(description="f'(acc): 1 − acc, or 1/(acc + ε)")
    ] = "one_minus"


class StaticUpdate(Settings):
    effective_steps: Annotated[
        Annotated[int, Field(ge=1)] | Literal["full"], Field(description="τ_eff: 5, 10, 20 …, or full")
    ] = 10


class DeviceMomentum(Settings):
    device_momentum: Annotated[Beta, Field(description="β', on devices, restarted in each round")] = 0.9


class ServerMomentum(Settings):
    server_momentum: Annotated[Beta, Field(description="β, on the server's pseudo-gradient")] = 0.5
    momentum_start: Annotated[
        Literal["first", "zero"], Field(description="the server's momentum begins as the first g, or as 0")
    ] = "first"


class Rates(LabelMix):
    prune_round: Annotated[int, Field(ge=0, description="rounds that have finished when it prunes")] = 30
    rate: Annotated[
        Literal["density", "gap", "fixed"], Field(description="how a node finds its pruning rate")
    ] = "density"
    fixed_rate: Annotated[Rate | None, Field(description="p* where rate is fixed")] = None
    rate_nodes: Annotated[
        Literal["all", "selected", "server"], Field(description="nodes that find a rate")
    ] = "all"
    max_rate: Annotated[
        Rate | None, Field(description="largest rate of a node; default 0.6 with gap, none otherwise")
    ] = None

    @model_validator(mode="after")
    def _complete(self) -> Rates:
        if self.rate == "fixed" and self.fixed_rate is None:
            raise ValueError("method.rate = 'fixed' needs method.fixed_rate, a number from 0 to 1")
        return self


class Coupled(Settings):
    coupled: Annotated[
        bool, Field(description="also prune convolutions that share channels through residual sums")
    ] = False


class Pruning(Rates, Coupled):
    pass


class Magnitude(Rates):
    rate_nodes: Annotated[
        Literal["all", "selected", "server"], Field(description="nodes that find a rate")
    ] = "server"


class Adjusted(Settings):
    adjust_every: Annotated[int, Field(ge=1, description="rounds between two adjustments of the mask")] = 50
    first_passes: Annotated[
        int, Field(ge=0, description="passes over 200 images in which a device finds the first mask, at most")
    ] = 1000


class Uniform(Coupled):
    prune_round: Annotated[int, Field(ge=0, description="rounds that have finished when it prunes")] = 30
    prune_rate: Annotated[Rate, Field(description="share of the filters removed from every convolution")] = (
        0.4
    )


class Base(Settings):
    base: Annotated[Literal["fedavg", "feddu", "feddum"], Field(description="the method that is pruned")] = (
        "fedavg"
    )


class Proximal(Settings):
    mu: Annotated[float, Field(ge=0, allow_inf_nan=False, description="μ, the pull to the global model")] = (
        0.01
    )


class FedOpt(Settings):
    server_lr: Annotated[float, Field(gt=0, allow_inf_nan=False, description="η of the server")] = 0.01
    beta1: Annotated[Beta, Field(description="β₁, of the mean update")] = 0.9
    beta2: Annotated[Beta, Field(description="β₂, of its square; fedadagrad has no use for it")] = 0.99
    tau: Annotated[float, Field(gt=0, allow_inf_nan=False, description="τ, added to √v")] = 0.001


class Distillation(Settings):
    budget: Annotated[
        Literal["full", "small"],
        Field(
            description="full: up to 10000 steps a round, stop after 1000 without gain; small: 500 and 200"
        ),
    ] = "full"


class Transfer(Settings):
    transfer_on_clock: Annotated[
        bool, Field(description="count the time to send the server's images to all devices at first")
    ] = False


class Voting(Transfer):
    partitions: Annotated[
        int, Field(ge=1, description="times a device divides its data; one student each")
    ] = 2
    subsets: Annotated[int, Field(ge=1, description="parts of each division; a teacher each")] = 5


class OneShot(Settings):
    vote_epochs: Annotated[
        int, Field(ge=1, description="epochs of each teacher, student and final model")
    ] = 100


class Sharing(Transfer):
    shared_samples: Annotated[
        int, Field(ge=1, description="samples of the server's that each device is given, at most")
    ] = 2000


class SharedMomentum(Settings):
    momentum: Annotated[Beta, Field(description="β of the momentum that server and devices share")] = 0.9
