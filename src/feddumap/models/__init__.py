"""Networks as data: a family's name, the classes and each convolution's width are enough to rebuild one."""

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
