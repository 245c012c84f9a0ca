"""Every method, one file each: its settings, device side, server side and recipe.

To add a method, write its file, import it here and add its name to the order below: the tests of general
invariants run over the table. Importing this package fills the table.
"""

from feddumap.methods import (
    data_sharing,
    fedap,
    fedavg,
    fedda,
    feddf,
    feddu,
    feddum,
    feddumap,
    fedkt,
    fedopt,
    fedprox,
    hrank,
    hybrid_fl,
    imc,
    mime_lite,
    prunefl,
    scaffold,
)
from feddumap.methods.registry import arrange, compose

arrange(
    [
        "fedavg",
        *("feddu", "feddu-s", "feddu-sm", "feddu-dm", "feddum", "fedap", "fedduap", "feddumap"),
        *("server-momentum", "device-momentum", "fedda", "feddu-da", "mime-lite"),
        *("data-sharing", "hybrid-fl", "feddf", "fedkt", "fedkt-iter"),
        *("hrank", "imc", "prunefl"),
        *("fedprox", "scaffold", "fedadagrad", "fedadam", "fedyogi"),
    ]
)

__all__ = [
    "compose",
    "data_sharing",
    "fedap",
    "fedavg",
    "fedda",
    "feddf",
    "feddu",
    "feddum",
    "feddumap",
    "fedkt",
    "fedopt",
    "fedprox",
    "hrank",
    "hybrid_fl",
    "imc",
    "mime_lite",
    "prunefl",
    "scaffold",
]
