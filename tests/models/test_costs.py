"""Multiply-adds and parameters of layers of every kind, counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddumap import models
from feddumap.core.messages import Architecture, InputSpec
from feddumap.models.cost import LayerCost
from tests.support import own_networks

GREY = InputSpec("image", (1, 16, 16))
ROWS = InputSpec("numbers", (6, 5))
VOLUME = InputSpec("numbers", (2, 4, 6, 5))


def shape_of(factory: Callable[..., nn.Module], given: InputSpec = GREY) -> Architecture:
    name = f"cost-{factory.__name__}-{given.kind}"
    models.register(name, factory)
    return models.architecture(name, 3, given)


def rows_of(shape: Architecture) -> dict[str, LayerCost]:
    table = models.layer_table(shape)
    assert sum(row.macs for row in table) == models.macs(shape)
    assert sum(row.parameters for row in table) == models.parameters(shape)
    return {row.name: row for row in table}


class Attending(nn.Module):
    """Six tokens of width 4, two heads, and products of matrices in a module without parameters."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mixing = Mixing()
        self.head = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        y: torch.Tensor = self.head(self.mixing(self.attention(x, x, x)[0]).mean(1))
        return y


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_attention() -> None:
    rows = rows_of(shape_of(Attending, ROWS))
    projections, products = (
        6 * 4 * 12 + 6 * 4 * 4,
        2 * (6 * 6 * 2) * 2,
    )  # q, k, v and out; two heads of width 2
    assert rows["attention"] == (
        "attention", "MultiheadAttention", (12, 4), 12 * 4 + 12, projections + products,
    )  # fmt: skip
    assert rows["attention.out_proj"].macs == 0  # its product is made by the module above
    assert rows["attention.out_proj"].parameters == 4 * 4 + 4
    assert rows["mixing"] == ("mixing", "Mixing", (), 0, 2 * 6 * 6 * 4)
    assert rows["embed"].macs == 6 * 5 * 4
    assert rows["head"].macs == 4 * 3


def test_an_encoder_layer() -> None:
    shape = shape_of(own_networks.Attention)
    attention = 16 * 8 * (24 + 8) + 2 * (16 * 16 * 8)
    by_hand = 16 * 16 * 8 + attention + 2 * 16 * 8 * 12 + 8 * 3
    assert models.macs(shape) == by_hand
    assert rows_of(shape)["encoder.self_attn"].macs == attention


def test_transposed_convolutions() -> None:
    rows = rows_of(shape_of(own_networks.transposed))
    assert rows["layers.0"].macs == 4 * 4 * 4 * 9  # 16 → 4 × 4 maps
    # each of 4 × 4 inputs of 4 channels meets 3 filters of 2 × 2
    assert rows["layers.2"] == ("layers.2", "ConvTranspose2d", (4, 3, 2, 2), 48 + 3, 4 * 4 * 4 * 3 * 4)


def test_one_and_three_dimensions() -> None:
    def three(classes: int) -> nn.Module:
        return nn.Sequential(nn.Conv3d(2, 3, (3, 3, 2)), nn.Flatten(), nn.Linear(3 * 2 * 4 * 4, classes))

    rows = rows_of(shape_of(three, VOLUME))
    assert rows["0"].macs == 2 * 4 * 4 * 3 * (2 * 18)
    assert set(models.layer_macs(shape_of(three, VOLUME))) == {"0", "2"}
    rows = rows_of(shape_of(own_networks.sequence))
    assert rows["1"].macs == 63 * 4 * 5  # 256 pixels, windows of 5 at every fourth


def test_recurrent_layers() -> None:
    rows = rows_of(shape_of(own_networks.Recurrent))
    assert rows["cells"].macs == 16 * 4 * 6 * (16 + 6)
    assert rows_of(shape_of(own_networks.gru))["cells"].macs == 16 * 3 * 6 * (16 + 6)


def test_embeddings_are_looked_up_and_a_tie_counts_once() -> None:
    rows = rows_of(shape_of(own_networks.TiedLinear))
    assert rows["embed"] == ("embed", "Embedding", (3, 6), 18, 0)
    assert rows["out"] == ("out", "Linear", (), 0, 18)
    assert rows_of(shape_of(own_networks.Bag))["bag"].macs == 0


def test_a_module_used_twice_costs_twice_and_has_its_parameters_once() -> None:
    rows = rows_of(shape_of(own_networks.UsedTwice))
    assert rows["first.0"].macs == 2 * 7 * 7 * 4 * 4 * 9
    assert rows["first.0"].parameters == 4 * 4 * 9 + 4
    assert "second.0" not in rows


def test_frozen_parameters_cost_but_do_not_count() -> None:
    rows = rows_of(shape_of(own_networks.PartlyFrozen))
    assert rows["backbone"] == ("backbone", "Conv2d", (6, 1, 3, 3), 6, 7 * 7 * 6 * 9)
    assert rows["norm"].parameters == 0
    assert rows["unused"].macs == 0


@pytest.mark.parametrize("kind", own_networks.KINDS)
def test_rows_sum_to_the_total(kind: str) -> None:
    rows = rows_of(shape_of(getattr(own_networks, kind)))
    assert max(row.macs for row in rows.values()) > 0
