"""Model families. An `Architecture` (family, classes, width of each convolution) suffices to rebuild a
network."""

from feddumap.models.cost import LayerCost, full_macs, layer_macs, layer_table, macs, parameters
from feddumap.models.registry import (
    architecture,
    build,
    channels_of,
    families,
    frozen_names,
    initialise,
    layer_widths,
    network,
    register,
    separate,
    unpruned,
)
from feddumap.models.state import load_state, state_of, trainable

__all__ = [
    "LayerCost",
    "architecture",
    "build",
    "channels_of",
    "families",
    "frozen_names",
    "full_macs",
    "initialise",
    "layer_macs",
    "layer_table",
    "layer_widths",
    "load_state",
    "macs",
    "network",
    "parameters",
    "register",
    "separate",
    "state_of",
    "trainable",
    "unpruned",
]
