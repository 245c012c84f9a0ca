"""Every method, one file each: its settings, its device side, its server side, and the function that composes
it. Importing this package fills the table of methods.

Here each method is a function of its keys that returns a `Method`, for Python programs:

>>> feddumap(c=0.5, prune_round=20)
Method('feddumap', c=0.5, prune_round=20)

The name of a method's function hides that of its file: `from feddumap.methods.feddumap import ...` reads the
file. To add a method, write its file and name it here, three times; the tests of general invariants run over
the table.
"""

from feddumap.methods.data_sharing import data_sharing as _data_sharing
from feddumap.methods.fedap import fedap as _fedap
from feddumap.methods.fedap import fedduap as _fedduap
from feddumap.methods.fedavg import fedavg as _fedavg
from feddumap.methods.fedda import fedda as _fedda
from feddumap.methods.fedda import feddu_da as _feddu_da
from feddumap.methods.feddf import feddf as _feddf
from feddumap.methods.feddu import feddu as _feddu
from feddumap.methods.feddu import feddu_s as _feddu_s
from feddumap.methods.feddum import feddu_dm as _feddu_dm
from feddumap.methods.feddum import feddu_sm as _feddu_sm
from feddumap.methods.feddum import feddum as _feddum
from feddumap.methods.feddum import only_device_momentum as _only_device_momentum
from feddumap.methods.feddum import only_server_momentum as _only_server_momentum
from feddumap.methods.feddumap import feddumap as _feddumap
from feddumap.methods.feddumap import feddumap_c as _feddumap_c
from feddumap.methods.feddumap import feddumap_cs as _feddumap_cs
from feddumap.methods.fedkt import fedkt as _fedkt
from feddumap.methods.fedkt import fedkt_iter as _fedkt_iter
from feddumap.methods.fedopt import fedadagrad as _fedadagrad
from feddumap.methods.fedopt import fedadam as _fedadam
from feddumap.methods.fedopt import fedyogi as _fedyogi
from feddumap.methods.fedprox import fedprox as _fedprox
from feddumap.methods.hrank import hrank as _hrank
from feddumap.methods.hybrid_fl import hybrid_fl as _hybrid_fl
from feddumap.methods.imc import imc as _imc
from feddumap.methods.method import Method, public
from feddumap.methods.mime_lite import mime_lite as _mime_lite
from feddumap.methods.prunefl import prunefl as _prunefl
from feddumap.methods.registry import arrange, compose
from feddumap.methods.scaffold import scaffold as _scaffold

arrange(
    [
        "fedavg",
        *("feddu", "feddu-s", "feddu-sm", "feddu-dm", "feddum", "fedap", "fedduap", "feddumap"),
        *("feddumap-c", "feddumap-cs"),
        *("server-momentum", "device-momentum", "fedda", "feddu-da", "mime-lite"),
        *("data-sharing", "hybrid-fl", "feddf", "fedkt", "fedkt-iter"),
        *("hrank", "imc", "prunefl"),
        *("fedprox", "scaffold", "fedadagrad", "fedadam", "fedyogi"),
    ]
)

fedavg = public(_fedavg)
feddu = public(_feddu)
feddu_s = public(_feddu_s)
feddu_sm = public(_feddu_sm)
feddu_dm = public(_feddu_dm)
feddum = public(_feddum)
fedap = public(_fedap)
fedduap = public(_fedduap)
feddumap = public(_feddumap)
feddumap_c = public(_feddumap_c)
feddumap_cs = public(_feddumap_cs)
server_momentum = public(_only_server_momentum)
device_momentum = public(_only_device_momentum)
fedda = public(_fedda)
feddu_da = public(_feddu_da)
mime_lite = public(_mime_lite)
data_sharing = public(_data_sharing)
hybrid_fl = public(_hybrid_fl)
feddf = public(_feddf)
fedkt = public(_fedkt)
fedkt_iter = public(_fedkt_iter)
hrank = public(_hrank)
imc = public(_imc)
prunefl = public(_prunefl)
fedprox = public(_fedprox)
scaffold = public(_scaffold)
fedadagrad = public(_fedadagrad)
fedadam = public(_fedadam)
fedyogi = public(_fedyogi)

__all__ = [
    "Method",
    "compose",
    "data_sharing",
    "device_momentum",
    "fedadagrad",
    "fedadam",
    "fedap",
    "fedavg",
    "fedda",
    "feddf",
    "feddu",
    "feddu_da",
    "feddu_dm",
    "feddu_s",
    "feddu_sm",
    "fedduap",
    "feddum",
    "feddumap",
    "feddumap_c",
    "feddumap_cs",
    "fedkt",
    "fedkt_iter",
    "fedprox",
    "fedyogi",
    "hrank",
    "hybrid_fl",
    "imc",
    "mime_lite",
    "prunefl",
    "scaffold",
    "server_momentum",
]
