"""Devices that train in a stack against the same devices alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddumap.device.stack import Stack, stackable
from feddumap.device.training import Group, Rule, masked, momentum, proximal, sgd, to_input
from feddumap.models import architecture, initialise, network
from feddumap.models.chains import LENET
from feddumap.types import Architecture

pytestmark = pytest.mark.usefixtures("one_thread")

Batches = tuple[list[torch.Tensor], list[torch.Tensor]]


def family(name: str) -> Callable[[int], nn.Module]:
    whole = architecture(name, classes=10)
    return lambda seed: network(whole, initialise(whole, seed))


def pruned(seed: int) -> nn.Module:
    odd = Architecture("lenet", 10, (("conv1", 5), ("conv2", 13)))
    return network(odd, initialise(odd, seed))


def own(seed: int) -> nn.Module:
    """Padding, strides, other kernels and pools, ReLU first, one linear layer, contiguous weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return own_layers()


def own_layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 7, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(7, 9, (3, 2), padding=(2, 1)),
        nn.ReLU(),
        nn.Conv2d(9, 11, 1, padding="same"),
        nn.MaxPool2d((2, 3), ceil_mode=True),
        nn.Flatten(),
        nn.Linear(165, 10),
    )


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "lenet": family("lenet"),
    "cnn": family("cnn"),
    "pruned": pruned,
    "own": own,
}
each_network = pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)


def data(devices: int, size: int, seed: int = 0) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (devices, size, 32, 32, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (devices, size), generator=generator)
    return [to_input(batch) for batch in images], list(labels)


def alone(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Group:
    return list(torch.autograd.grad(F.cross_entropy(module(inputs), targets), list(module.parameters())))


def apart(stack: Stack, group: Group, like: list[nn.Module]) -> list[Group]:
    """A stacked group device by device."""
    parts = [[torch.full_like(p, torch.nan) for p in module.parameters()] for module in like]
    stack.scatter(group, parts)
    return parts


def padding(stack: Stack, group: Group, like: list[nn.Module]) -> Group:
    """What a stacked group holds outside every device's part."""
    inside = stack.gather([[torch.ones_like(p) for p in module.parameters()] for module in like])
    return [tensor[places == 0] for tensor, places in zip(group, inside, strict=True)]


@each_network
@pytest.mark.parametrize(("devices", "size"), [(1, 10), (2, 3), (2, 10), (5, 10), (5, 3), (3, 1)])
def test_gradients_are_those_of_each_device_alone(
    make: Callable[[int], nn.Module], devices: int, size: int
) -> None:
    modules = [make(seed) for seed in range(devices)]
    inputs, targets = data(devices, size)
    stack = Stack(modules)
    grads = stack.gradients(inputs, targets)
    assert [grad.shape for grad in grads] == [parameter.shape for parameter in stack.parameters]
    for module, own_grads, x, y in zip(modules, apart(stack, grads, modules), inputs, targets, strict=True):
        for got, expected in zip(own_grads, alone(module, x, y), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
            # an element may be small by cancellation: the whole is compared by its own size too
            assert (got - expected).norm() <= 1e-5 * expected.norm()


def rules(kept: list[dict[str, torch.Tensor]]) -> dict[str, Callable[[int], Rule]]:
    """A device's rule; the last one depends on the device."""
    return {
        "sgd": lambda _: sgd(),
        "momentum": lambda _: momentum(0.9),
        "proximal": lambda _: proximal(0.1),
        "masked": lambda device: masked(momentum(0.9), kept[device]),
    }


@each_network
@pytest.mark.parametrize("name", ["sgd", "momentum", "proximal", "masked"])
def test_steps_are_those_of_each_device_alone(make: Callable[[int], nn.Module], name: str) -> None:
    devices, lr = 3, 0.1
    modules = [make(seed) for seed in range(devices)]
    together = [make(seed) for seed in range(devices)]
    kept = [
        {
            key: (torch.rand(p.shape, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
            for key, p in module.named_parameters()
            if p.ndim > 1
        }
        for seed, module in enumerate(modules)
    ]
    chosen = [rules(kept)[name](device) for device in range(devices)]
    batches = [data(devices, size, seed) for seed, size in enumerate((10, 10, 3, 10))]

    states = [
        rule.init(dict(module.named_parameters())) for rule, module in zip(chosen, together, strict=True)
    ]
    stack = Stack(together)
    count = len(stack.parameters)
    state = [
        tensor
        for start in range(0, len(states[0]), count)
        for tensor in stack.gather([own_state[start : start + count] for own_state in states])
    ]
    for inputs, targets in batches:
        grads = stack.gradients(inputs, targets)
        with torch.no_grad():
            chosen[0].step(stack.parameters, grads, state, lr)
    stack.scatter(stack.parameters, [list(module.parameters()) for module in together])
    for start in range(0, len(state), count):
        parts = [own_state[start : start + count] for own_state in states]
        stack.scatter(state[start : start + count], parts)

    for device, (module, rule) in enumerate(zip(modules, chosen, strict=True)):
        parameters: Group = list(module.parameters())
        own_state = rule.init(dict(module.named_parameters()))
        for inputs, targets in batches:
            grads = alone(module, inputs[device], targets[device])
            with torch.no_grad():
                rule.step(parameters, grads, own_state, lr)
        moved = (flat(parameters) - flat(make(device).parameters())).norm()
        assert moved > 0.01
        # not by element: of two values closer than rounding, a max-pool gives either the gradient
        assert (flat(together[device].parameters()) - flat(parameters)).norm() <= 0.005 * moved
        if own_state:
            assert (flat(states[device]) - flat(own_state)).norm() <= 0.005 * flat(own_state).norm()


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.mark.parametrize("name", ["lenet", "pruned", "own"])
def test_the_padding_stays_exactly_zero(name: str) -> None:
    modules = [NETWORKS[name](seed) for seed in range(3)]
    stack = Stack(modules)
    rule = momentum(0.9)
    state = [torch.zeros_like(parameter) for parameter in stack.parameters]
    for step in range(6):
        grads = stack.gradients(*data(3, 10, step))
        with torch.no_grad():
            rule.step(stack.parameters, grads, state, 0.5)
    for group in (stack.parameters, grads, state):
        outside = padding(stack, group, modules)
        assert sum(tensor.numel() for tensor in outside) > 0
        for tensor in outside:
            assert torch.count_nonzero(tensor) == 0


def test_widths_are_padded_to_what_is_fast() -> None:
    """5 and 13 channels: 3 → 4 inputs, 8 and 16 outputs, and fc1 keeps its 13 · 25 inputs."""
    stack = Stack([pruned(1), pruned(2)])
    shapes = [tuple(parameter.shape) for parameter in stack.parameters]
    convolutions = [(2 * 8, 4, 5, 5), (2 * 8,), (2 * 16, 8, 5, 5), (2 * 16,)]
    assert shapes[:6] == [*convolutions, (2, 120, 325), (2, 1, 120)]
    assert stack.parameters[0].is_contiguous(memory_format=torch.channels_last)
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in stack.parameters)


@each_network
def test_gather_and_scatter_are_inverse(make: Callable[[int], nn.Module]) -> None:
    modules = [make(seed) for seed in range(4)]
    stack = Stack(modules)
    weights = [[p.detach().clone() for p in module.parameters()] for module in modules]
    for group in (stack.parameters, stack.gather(weights)):
        for parts, expected in zip(apart(stack, group, modules), weights, strict=True):
            assert all(torch.equal(got, tensor) for got, tensor in zip(parts, expected, strict=True))
    for gathered, parameter in zip(stack.gather(weights), stack.parameters, strict=True):
        assert torch.equal(gathered, parameter)
        assert gathered.stride() == parameter.stride()
        assert not gathered.requires_grad


def test_the_networks_are_left_alone() -> None:
    modules = [pruned(seed) for seed in range(2)]
    stack = Stack(modules)
    grads = stack.gradients(*data(2, 10))
    with torch.no_grad():
        sgd().step(stack.parameters, grads, [], 0.5)
    for seed, module in enumerate(modules):
        for got, expected in zip(module.parameters(), pruned(seed).parameters(), strict=True):
            assert torch.equal(got, expected)


@each_network
def test_equal_inputs_give_equal_bits(make: Callable[[int], nn.Module]) -> None:
    """Also after other inputs and another batch size through the same stack."""
    modules = [make(seed) for seed in range(2)]
    stack = Stack(modules)
    first = stack.gradients(*data(2, 10))
    stack.gradients(*data(2, 3, seed=1))
    stack.gradients(*data(2, 10, seed=2))
    for again in (stack.gradients(*data(2, 10)), Stack(modules).gradients(*data(2, 10))):
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))


@each_network
@pytest.mark.parametrize("devices", [2, 5])
def test_a_device_does_not_depend_on_the_others(make: Callable[[int], nn.Module], devices: int) -> None:
    """To the bit: neither on their data nor on their weights."""
    modules = [make(seed) for seed in range(devices)]
    others = [modules[0], *(make(seed + 100) for seed in range(1, devices))]
    inputs, targets = data(devices, 10)
    other_inputs, other_targets = data(devices, 10, seed=1)
    stack, other = Stack(modules), Stack(others)
    one = apart(stack, stack.gradients(inputs, targets), modules)[0]
    two = apart(
        other,
        other.gradients([inputs[0], *other_inputs[1:]], [targets[0], *other_targets[1:]]),
        others,
    )[0]
    assert all(torch.equal(got, expected) for got, expected in zip(one, two, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(AssertionError, match="equal networks"):
        Stack([pruned(1), family("lenet")(1)])
    with pytest.raises(AssertionError, match="plain chains"):
        Stack([nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))])
    stack = Stack([pruned(1), pruned(2)])
    inputs, targets = data(2, 10)
    with pytest.raises(AssertionError, match="shape"):
        stack.gradients([inputs[0], inputs[1][:1]], targets)
    with pytest.raises(AssertionError, match="shape"):
        stack.gradients([inputs[0], inputs[1]], [targets[0], targets[1][:1]])
    with pytest.raises(AssertionError, match="channels"):
        stack.gradients([batch[:, :1] for batch in inputs], targets)
    with pytest.raises(AssertionError, match="stretch"):
        stack.gather([[p[:1] for p in pruned(seed).parameters()] for seed in (1, 2)])
    with pytest.raises(AssertionError, match="devices"):
        stack.gather([list(pruned(1).parameters())])


def chain(**changes: nn.Module) -> nn.Sequential:
    layers: dict[str, nn.Module] = {
        "conv": nn.Conv2d(3, 8, 5),
        "pool": nn.MaxPool2d(2),
        "relu": nn.ReLU(),
        "flatten": nn.Flatten(),
        "hidden": nn.Linear(8 * 14 * 14, 16),
        "relu2": nn.ReLU(),
        "fc": nn.Linear(16, 10),
    }
    return nn.Sequential(*{**layers, **changes}.values())


def frozen() -> nn.Module:
    network = chain()
    next(network.parameters()).requires_grad_(False)
    return network


def shared() -> nn.Module:
    layer = nn.Linear(16, 16)
    return chain(relu2=nn.Sequential(), fc=layer).extend([layer])


class Louder(nn.ReLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", ["lenet", "cnn", "vgg11"])
def test_chains_are_stackable(name: str) -> None:
    assert stackable(family(name)(1))


def test_plain_chains_are_stackable() -> None:
    assert stackable(chain())
    assert stackable(own(1))
    assert stackable(LENET.resized({"conv1": 1, "conv2": 1}, classes=2))


@pytest.mark.parametrize(
    "other",
    [
        family("resnet18")(1),
        chain(relu=nn.BatchNorm2d(8)),
        chain(relu2=nn.Dropout()),
        chain(pool=nn.Conv2d(8, 8, 3, groups=2)),
        chain(conv=nn.Conv2d(3, 8, 5, bias=False)),
        chain(conv=nn.Conv2d(3, 8, 5, dilation=2)),
        chain(conv=nn.Conv2d(3, 8, 5, padding=1, padding_mode="reflect")),
        chain(fc=nn.Linear(16, 10, bias=False)),
        chain(relu=Louder()),
        chain(relu2=nn.Flatten()),
        chain(relu=nn.Linear(14, 14)),
        chain(flatten=nn.ReLU()),
        chain(flatten=nn.Flatten(2)),
        chain(pool=nn.MaxPool2d(2, return_indices=True)),
        chain().double(),
        chain().to("meta"),
        frozen(),
        shared(),
        nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)),
        nn.Sequential(),
        nn.Linear(3, 3),
    ],
    ids=lambda module: str(module).replace("\n", "")[:60],
)
def test_others_are_not_stackable(other: nn.Module) -> None:
    assert not stackable(other)
