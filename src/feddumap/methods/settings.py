"""Groups of `[method]` keys that several methods share. A method's own groups are in its file."""

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


class SharedMomentum(Settings):
    momentum: Annotated[Beta, Field(description="β of the momentum that server and devices share")] = 0.9


TransferOnClock = Annotated[
    bool, Field(description="count the time to send the server's images to all devices at first")
]


class Transfer(Settings):
    transfer_on_clock: TransferOnClock = False


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


class Cuts(Settings):
    units: Annotated[
        Literal["filters", "all"],
        Field(description="what is removed: filters of convolutions, or hidden units of linear layers too"),
    ] = "filters"
    coupled: Annotated[
        bool, Field(description="also prune layers that share channels through residual sums")
    ] = False
    keep: list[str] = Field(
        default=[], description="names of layers that are not pruned, as patterns such as 'head.*'"
    )


class Base(Settings):
    base: Annotated[Literal["fedavg", "feddu", "feddum"], Field(description="the method that is pruned")] = (
        "fedavg"
    )
