"""Model families. An `Architecture` (family, classes, width of each convolution) suffices to rebuild a
network."""

from feddumap.models.cost import LayerCost, full_macs, layer_macs, layer_table, macs, parameters
from feddumap.models.registry import (
    INPUT_SHAPE,
    architecture,
    build,
    channels_of,
    families,
    initialise,
    network,
    register,
)

__all__ = [
    "INPUT_SHAPE",
    "LayerCost",
    "architecture",
    "build",
    "channels_of",
    "families",
    "full_macs",
    "initialise",
    "layer_macs",
    "layer_table",
    "macs",
    "network",
    "parameters",
    "register",
]
