"""Every named method, as a composition of slots. A recipe's parameters are groups of keys of `[method]`.

To add a method: write the function it needs in its slot, add a recipe here, and every invariant test runs
over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from feddumap.config import Config
from feddumap.core.algorithm import Algorithm, at_round, beside, chain, every, first_of, with_shared
from feddumap.core.messages import Architecture
from feddumap.methods.adaptive import layer_adaptive
from feddumap.methods.carried import control, sending, shared_average, statistic, with_update
from feddumap.methods.feddf import distilled
from feddumap.methods.feddu import dynamic, server_update, static
from feddumap.methods.feddum import server_momentum
from feddumap.methods.fedkt import elected
from feddumap.methods.fedopt import Second, adagrad, adam, fedopt, yogi
from feddumap.methods.hybrid_fl import with_server
from feddumap.methods.local import local_sgd, mime_lite, restarted_momentum, shared_momentum, train_with
from feddumap.methods.local import scaffold as controlled
from feddumap.methods.prunefl import adjustment, first_pruning, reply_nbytes, reporting
from feddumap.methods.registry import find, recipe, resolve, settings_of
from feddumap.methods.settings import (
    Adjusted,
    Base,
    DeviceMomentum,
    Distillation,
    DynamicUpdate,
    FedOpt,
    Magnitude,
    OneShot,
    Proximal,
    Pruning,
    Rates,
    ServerMomentum,
    SharedMomentum,
    Sharing,
    StaticUpdate,
    Uniform,
    Voting,
)
from feddumap.methods.teaching import EVERYTHING, School, party, passes
from feddumap.methods.uniform import uniform
from feddumap.pruning.dependency_graph import prunable
from feddumap.pruning.global_rate import GlobalRate, fixed, from_nodes
from feddumap.pruning.masks import by_magnitude
from feddumap.pruning.removal import try_out
from feddumap.training.optimizers import proximal


@recipe("fedavg")
def fedavg() -> Algorithm:
    """Federated averaging: devices train with SGD, the server takes the weighted mean (McMahan et al.)."""
    return Algorithm(local=local_sgd())


@recipe("feddu")
def feddu(update: DynamicUpdate) -> Algorithm:
    """Dynamic update: the server also trains on its data and goes part of the way, adaptively."""
    rule = dynamic(update.c, update.decay, update.accuracy_weight)
    server = server_update(rule, hold_out=update.decay == "held-out")
    return replace(fedavg(), server=server, labels=update.label_mix, server_data=True)


@recipe("feddu-s")
def feddu_s(update: StaticUpdate) -> Algorithm:
    """FedDU with a fixed number of effective server steps."""
    return replace(fedavg(), server=server_update(static(update.effective_steps)), server_data=True)


@recipe("feddu-sm")
def feddu_sm(update: DynamicUpdate, server: ServerMomentum) -> Algorithm:
    """FedDU with momentum on the server only."""
    return smoothed(feddu(update), server)


@recipe("feddu-dm")
def feddu_dm(update: DynamicUpdate, device: DeviceMomentum) -> Algorithm:
    """FedDU with restarted momentum on the devices only."""
    return replace(feddu(update), local=restarted_momentum(device.device_momentum))


@recipe("feddum")
def feddum(update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum) -> Algorithm:
    """FedDU with momentum on devices and server, none of which is sent."""
    return smoothed(feddu_dm(update, device), server)


def smoothed(base: Algorithm, settings: ServerMomentum) -> Algorithm:
    """Any method, with momentum on what the server has made of a round."""
    step = server_momentum(settings.server_momentum, settings.momentum_start)
    return replace(base, server=chain(base.server, step))


def pruned(base: Algorithm, pruning: Pruning) -> Algorithm:
    """Any method, pruned once by FedAP. Rates are weighted by label mixes, so devices tell them."""
    reshape = at_round(pruning.prune_round, layer_adaptive(global_rate(pruning), pruning.coupled))
    return replace(asking(base, pruning), reshape=reshape, check=prunable_with(pruning.coupled))


def global_rate(keys: Rates) -> GlobalRate:
    """How the keys say that p* is found."""
    if keys.rate == "fixed":
        assert keys.fixed_rate is not None
        return fixed(keys.fixed_rate)
    return from_nodes(keys.rate, keys.rate_nodes, keys.max_rate)


def asking(base: Algorithm, keys: Rates) -> Algorithm:
    """Any method, with what finding p* needs: devices' label mixes, or images on the server."""
    if keys.rate == "fixed":
        return base
    if keys.rate_nodes == "server":
        return replace(base, server_data=True)
    return replace(base, labels=keys.label_mix)


def prunable_with(coupled: bool) -> Callable[[Architecture], None]:
    """Refuses, before any training, a network that could not be cut when its time comes."""
    return lambda shape: try_out(shape, prunable(shape).choose(coupled=coupled))


@recipe("fedap")
def fedap(pruning: Pruning) -> Algorithm:
    """FedAvg with adaptive pruning: once, filters are removed at rates found from the loss curvature."""
    return pruned(fedavg(), pruning)


@recipe("fedduap")
def fedduap(update: DynamicUpdate, pruning: Pruning) -> Algorithm:
    """Dynamic update and adaptive pruning."""
    return pruned(feddu(update), pruning)


@recipe("feddumap")
def feddumap(
    update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum, pruning: Pruning
) -> Algorithm:
    """Dynamic update, momentum and adaptive pruning: the whole of the paper."""
    return pruned(feddum(update, server, device), pruning)


@recipe("server-momentum")
def only_server_momentum(server: ServerMomentum) -> Algorithm:
    """FedAvg with momentum on the server."""
    return smoothed(fedavg(), server)


@recipe("device-momentum")
def only_device_momentum(device: DeviceMomentum) -> Algorithm:
    """FedAvg with momentum on the devices, restarted in each round."""
    return replace(fedavg(), local=restarted_momentum(device.device_momentum))


@recipe("fedda")
def fedda(settings: SharedMomentum) -> Algorithm:
    """Momentum that server and devices share, sent both ways (Jin et al.)."""
    local = shared_momentum(settings.momentum)
    return Algorithm(local=local, server=shared_average(), send=sending("v/"))


@recipe("feddu-da")
def feddu_da(update: DynamicUpdate, settings: SharedMomentum) -> Algorithm:
    """FedDU with FedDA's shared momentum."""
    rule = dynamic(update.c, update.decay, update.accuracy_weight)
    server = with_update(rule, settings.momentum, hold_out=update.decay == "held-out")
    return replace(fedda(settings), server=server, labels=update.label_mix, server_data=True)


@recipe("mime-lite")
def mimelite(settings: SharedMomentum) -> Algorithm:
    """Devices step with the server's frozen momentum and send a full gradient (Karimireddy et al.)."""
    return Algorithm(
        local=mime_lite(settings.momentum),
        server=statistic(settings.momentum),
        send=sending("s/"),
        passes=lambda samples, given, config: samples * (config.train.epochs + 1),  # and the full gradient
    )


@recipe("data-sharing")
def data_sharing(settings: Sharing) -> Algorithm:
    """Each device is given some of the server's data before the first round (Zhao et al.)."""
    limit = settings.shared_samples
    return replace(
        fedavg(),
        device_data=with_shared(limit),
        shared=limit,
        shared_on_clock=settings.transfer_on_clock,
        server_data=True,
    )


@recipe("hybrid-fl")
def hybrid_fl() -> Algorithm:
    """The server trains on its data like a device and joins the average."""
    return replace(fedavg(), aggregate=with_server, server_data=True)


BUDGETS = {"full": (10_000, 1000), "small": (500, 200)}
"""FedDF's steps at most, and how many without a better score end them."""


@recipe("feddf")
def feddf(settings: Distillation) -> Algorithm:
    """The devices' models together teach their mean, on the server's images (Lin et al.)."""
    steps, patience = BUDGETS[settings.budget]
    return replace(fedavg(), aggregate=distilled(steps, patience), server_data=True)


@recipe("fedkt")
def fedkt(voting: Voting, settings: OneShot) -> Algorithm:
    """In a single round, devices' teachers and then their students vote on labels to learn (Li et al.)."""
    return replace(by_vote(voting, School(settings.vote_epochs)), one_shot=True)


@recipe("fedkt-iter")
def fedkt_iter(voting: Voting) -> Algorithm:
    """FedKT's votes in every round, on models that go on from the global one."""
    return by_vote(voting, School())


def by_vote(keys: Voting, school: School) -> Algorithm:
    """The slots of FedKT. All of the server's images are public."""
    return Algorithm(
        local=party(keys.partitions, keys.subsets, school),
        aggregate=elected(keys.partitions, school),
        shared=EVERYTHING,
        shared_on_clock=keys.transfer_on_clock,
        server_data=True,
        passes=partial(passes, keys.partitions, keys.subsets, school),
        reply=lambda message: keys.partitions * message.reply_nbytes,
    )


@recipe("hrank")
def hrank(
    base: Base, update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum, settings: Uniform
) -> Algorithm:
    """One pruning at the same rate for every convolution, filters of lowest rank first (Lin et al.)."""
    return replace(
        on_top_of(base, update, server, device),
        reshape=at_round(settings.prune_round, uniform(settings.prune_rate, settings.coupled)),
        check=prunable_with(settings.coupled),
    )


@recipe("imc")
def imc(
    base: Base, update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum, settings: Magnitude
) -> Algorithm:
    """One mask over the smallest weights of the whole network, which are neither trained nor sent (Zhang)."""
    method = asking(on_top_of(base, update, server, device), settings)
    return replace(method, reshape=at_round(settings.prune_round, by_magnitude(global_rate(settings))))


@recipe("prunefl")
def prunefl(
    base: Base, update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum, settings: Adjusted
) -> Algorithm:
    """A mask found by one device, then adjusted to what each weight gains a second (Jiang et al.)."""
    method, every_ = on_top_of(base, update, server, device), settings.adjust_every
    return replace(
        method,
        local=reporting(method.local, every_),
        server=beside(method.server, "g2/", "dense/"),
        reshape=first_of(at_round(0, first_pruning(settings.first_passes)), every(every_, adjustment())),
        reply=lambda message: reply_nbytes(message, every_),
    )


def on_top_of(base: Base, update: DynamicUpdate, server: ServerMomentum, device: DeviceMomentum) -> Algorithm:
    """The method that a pruning method prunes."""
    return {"fedavg": fedavg(), "feddu": feddu(update), "feddum": feddum(update, server, device)}[base.base]


@recipe("fedprox")
def fedprox(settings: Proximal) -> Algorithm:
    """FedAvg whose devices are pulled back to the global model (Li et al.)."""
    return Algorithm(local=train_with(proximal(settings.mu)))


@recipe("scaffold")
def scaffold() -> Algorithm:
    """Devices' gradients are corrected by control variates that they keep (Karimireddy et al.)."""
    return Algorithm(local=controlled(), server=control(), send=sending("c/"))


@recipe("fedadagrad")
def fedadagrad(settings: FedOpt) -> Algorithm:
    """Adagrad on the server (Reddi et al.)."""
    return optimised(adagrad, settings)


@recipe("fedadam")
def fedadam(settings: FedOpt) -> Algorithm:
    """Adam on the server (Reddi et al.)."""
    return optimised(adam, settings)


@recipe("fedyogi")
def fedyogi(settings: FedOpt) -> Algorithm:
    """Yogi on the server (Reddi et al.)."""
    return optimised(yogi, settings)


def optimised(second: Second, keys: FedOpt) -> Algorithm:
    """FedAvg with an adaptive optimiser on the server."""
    return replace(fedavg(), server=fedopt(second, keys.server_lr, keys.beta1, keys.beta2, keys.tau))


def compose(config: Config) -> Algorithm:
    """The algorithm a configuration names."""
    method = resolve(config.method)
    return find(method.name).build(*settings_of(method))
