"""What the kernels refuse: networks that are no plain chains, and arguments that must not reach C."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from feddumap.training.kernels import loader
from feddumap.training.kernels.chain import Chain, Images
from feddumap.training.kernels.spec import LARGEST_KERNEL, MOST_LAYERS, ChainSpec, LayerSpec, spec_of

# --- networks -------------------------------------------------------------------------------------------


def chain(*convolutional: nn.Module, linear: tuple[nn.Module, ...] = ()) -> nn.Sequential:
    """Convolutional layers between a first one of three channels and a linear one."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), *convolutional, nn.Flatten(), nn.Linear(64, 10), *linear)


def frozen() -> nn.Sequential:
    network = chain()
    network[0].bias.requires_grad_(False)
    return network


def hooked(kind: str, place: int) -> nn.Sequential:
    network = chain(nn.ReLU())
    module = network if place < 0 else network[place]
    getattr(module, f"register_{kind}")(lambda *_: None)
    return network


def tied() -> nn.Sequential:
    network = chain(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    network[2].weight = network[1].weight
    return network


def twice(module: nn.Module) -> nn.Sequential:
    return chain(module, nn.Conv2d(4, 4, 3), module)


class Own(nn.Sequential):
    """May do anything."""


linear = nn.Linear(10, 10)
convolution = nn.Conv2d(4, 4, 3)

REFUSED: dict[str, Callable[[], nn.Module]] = {
    "stride": lambda: chain(nn.Conv2d(4, 4, 3, stride=2)),
    "stride in one direction": lambda: chain(nn.Conv2d(4, 4, 3, stride=(1, 2))),
    "dilation": lambda: chain(nn.Conv2d(4, 4, 3, dilation=2)),
    "groups": lambda: chain(nn.Conv2d(4, 4, 3, groups=2)),
    "padding by name": lambda: chain(nn.Conv2d(4, 4, 3, padding="same")),
    "padding by mirroring": lambda: chain(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")),
    "a huge kernel": lambda: chain(nn.Conv2d(4, 4, (LARGEST_KERNEL + 1, 1))),
    "one dimension": lambda: chain(nn.Conv1d(4, 4, 3)),
    "transposed": lambda: chain(nn.ConvTranspose2d(4, 4, 3)),
    "no bias": lambda: chain(nn.Conv2d(4, 4, 3, bias=False)),
    "no bias at the end": lambda: chain(linear=(nn.Linear(10, 10, bias=False),)),
    "batch norm": lambda: chain(nn.BatchNorm2d(4)),
    "dropout": lambda: chain(nn.Dropout()),
    "leaky ReLU": lambda: chain(nn.LeakyReLU()),
    "tanh": lambda: chain(nn.Tanh()),
    "average pool": lambda: chain(nn.AvgPool2d(2)),
    "adaptive pool": lambda: chain(nn.AdaptiveMaxPool2d(2)),
    "pool of three": lambda: chain(nn.MaxPool2d(3)),
    "pool with stride 1": lambda: chain(nn.MaxPool2d(2, stride=1)),
    "pool with padding": lambda: chain(nn.MaxPool2d(2, padding=1)),
    "pool with dilation": lambda: chain(nn.MaxPool2d(2, dilation=2)),
    "pool that rounds up": lambda: chain(nn.MaxPool2d(2, ceil_mode=True)),
    "pool that tells places": lambda: chain(nn.MaxPool2d(2, return_indices=True)),
    "two pools": lambda: chain(nn.MaxPool2d(2), nn.MaxPool2d(2)),
    "a pool first": lambda: nn.Sequential(nn.MaxPool2d(2), *chain()),
    "a ReLU first": lambda: nn.Sequential(nn.ReLU(), *chain()),
    "no convolution": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 10)),
    "no linear layer": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()),
    "not flattened": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(6, 10)),
    "flattened twice": lambda: chain(linear=(nn.Flatten(),)),
    "flattened from the start": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(0), nn.Linear(64, 10)),
    "flattened in part": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(1, 2), nn.Linear(64, 10)),
    "convolution behind": lambda: chain(linear=(nn.Conv2d(10, 10, 1),)),
    "widths that do not follow": lambda: chain(nn.Conv2d(5, 4, 3)),
    "features that do not follow": lambda: chain(linear=(nn.Linear(11, 10),)),
    "width zero": lambda: nn.Sequential(
        nn.Conv2d(3, 0, 3), nn.Conv2d(0, 4, 3), nn.Flatten(), nn.Linear(16, 10)
    ),
    "too many layers": lambda: chain(*(nn.Conv2d(4, 4, 1) for _ in range(MOST_LAYERS))),
    "float64": lambda: chain().double(),
    "on no device": lambda: chain().to("meta"),
    "frozen": frozen,
    "tied weights": tied,
    "a linear layer twice": lambda: chain(linear=(linear, nn.ReLU(), linear)),
    "a convolution twice": lambda: chain(convolution, nn.ReLU(), convolution),
    "a module of its own": lambda: Own(*chain()),
    "nested": lambda: nn.Sequential(chain(), nn.Linear(10, 10)),
    "hook": lambda: hooked("forward_hook", 0),
    "hook before": lambda: hooked("forward_pre_hook", 1),
    "hook on the way back": lambda: hooked("full_backward_hook", 2),
    "hook before the way back": lambda: hooked("full_backward_pre_hook", 2),
    "hook on the whole": lambda: hooked("forward_hook", -1),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_no_chain(name: str) -> None:
    assert spec_of(REFUSED[name]()) is None


def test_chains() -> None:
    pooled, odd = nn.MaxPool2d((2, 2)), nn.Conv2d(4, 7, (1, 4), padding=(0, 2))
    found = spec_of(
        chain(nn.ReLU(), pooled, odd, nn.MaxPool2d(2), nn.ReLU(inplace=True), linear=(nn.ReLU(),))
    )
    assert found == ChainSpec(
        (
            LayerSpec("0", 3, 4, (3, 3), (0, 0), pool=True, relu=True),
            LayerSpec("3", 4, 7, (1, 4), (0, 2), pool=True, relu=True),
            LayerSpec("7", 64, 10, relu=True),
        )
    )
    network = chain(linear=(nn.Linear(10, 5), nn.Linear(5, 2)))
    assert [layer.name for layer in spec_of(network).layers] == ["0", "2", "3", "4"]  # type: ignore[union-attr]
    assert spec_of(chain(*(nn.Conv2d(4, 4, 1) for _ in range(MOST_LAYERS - 2)))) is not None


def test_a_relu_or_pool_used_twice_counts_twice() -> None:
    """It has no state, so that the network is a chain; were it counted once, the chain would be another."""
    for module, read in [(nn.ReLU(), "relu"), (nn.MaxPool2d(2), "pool")]:
        found = spec_of(twice(module))
        assert found is None or [getattr(layer, read) for layer in found.layers] == [True, True, False]


def test_sizes() -> None:
    spec = spec_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 10)))
    assert spec is not None
    assert spec.sizes(9, 6) == [(3, 2)]
    assert spec.fits(9, 6)
    assert spec.fits(8, 7)
    assert not spec.fits(10, 6)  # other features
    assert not spec.fits(2, 2)  # nothing is left
    assert replace(spec.layers[0], pool=False) == spec.maps_of("0").layers[0]
    assert spec.maps_of("0").fits(3, 3)
    assert not spec.maps_of("0").fits(2, 3)


# --- arguments ------------------------------------------------------------------------------------------

SPEC = ChainSpec((LayerSpec("0", 3, 4, (3, 3), pool=True, relu=True), LayerSpec("1", 36, 5)))
SIZE = (8, 8)
SOURCE = torch.zeros(6, *SIZE, 3, dtype=torch.uint8)
LABELS = torch.zeros(6, dtype=torch.int64)
NUMBERS = 4 * 27 + 4 + 5 * 37


def images(
    source: torch.Tensor = SOURCE,
    order: np.ndarray | None = None,
    crops: np.ndarray | None = None,
    labels: torch.Tensor | None = LABELS,
    shift: torch.Tensor | None = None,
) -> Images:
    return Images(source, order, crops, labels, shift)


def gradients(
    given: Images | None = None,
    span: tuple[int, int] = (0, 4),
    parameters: torch.Tensor | None = None,
    grads: torch.Tensor | None = None,
    spec: ChainSpec = SPEC,
) -> float:
    flat = torch.zeros(NUMBERS) if parameters is None else parameters
    into = torch.zeros(NUMBERS) if grads is None else grads
    return Chain(spec, 4, SIZE).gradients(given or images(), span, flat, into)


def forward(
    given: Images | None = None, span: tuple[int, int] | None = None, numbers: int = NUMBERS
) -> object:
    return Chain(SPEC, 4, SIZE).forward(given or images(), torch.zeros(numbers), span)


def backward(output_grads: torch.Tensor, spec: ChainSpec = SPEC, numbers: int = NUMBERS) -> None:
    made = Chain(spec, 4, SIZE)
    made.backward(output_grads, torch.zeros(numbers), torch.zeros(numbers))


def product(vector: torch.Tensor, into: torch.Tensor) -> None:
    made = Chain(SPEC, 4, SIZE)
    made.hessian(images(), (0, 4), torch.zeros(NUMBERS), 1.0)(vector, into)


def labels(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def every_other(count: int) -> torch.Tensor:
    return torch.zeros(2 * count)[::2]


def layers(*given: LayerSpec) -> Chain:
    """With a linear layer that fits to one number."""
    return Chain(ChainSpec((*given, LayerSpec("last", given[-1].outputs, 2))), 1, (given[0].kernel or (1, 1)))


WRONG: dict[str, Callable[[], object]] = {
    # images
    "images of floats": lambda: images(SOURCE.float()),
    "images of signed bytes": lambda: images(SOURCE.to(torch.int8)),
    "images without channels": lambda: images(SOURCE[..., 0].contiguous()),
    "images not in a row": lambda: images(SOURCE[:, :, ::2]),
    "images channels first": lambda: images(SOURCE.permute(0, 3, 1, 2)),
    "images nowhere": lambda: images(SOURCE.to("meta")),
    "no images": lambda: images(SOURCE[:0], labels=LABELS[:0]),
    "none chosen": lambda: images(order=np.zeros(0, dtype=np.int64), labels=LABELS[:0]),
    "an image too many": lambda: images(order=np.array([6]), labels=LABELS[:1]),
    "an image before the first": lambda: images(order=np.array([-1]), labels=LABELS[:1]),
    "an order of two dimensions": lambda: images(order=np.zeros((6, 1), dtype=np.int64)),
    "an order of fractions": lambda: images(order=np.full(6, 0.5)),
    "an order of nothing": lambda: images(order=np.full(6, np.nan)),
    "crops of two numbers": lambda: images(crops=np.zeros((6, 2), dtype=np.int32)),
    "crops of too few images": lambda: images(crops=np.zeros((5, 3), dtype=np.int32)),
    "crops far away": lambda: images(crops=np.full((6, 3), 2**20 + 1)),
    "crops at the end of 32 bits": lambda: images(crops=np.full((6, 3), -(2**31), dtype=np.int32)),
    "crops of more than 32 bits": lambda: images(crops=np.full((6, 3), 2**32)),
    "crops of fractions": lambda: images(crops=np.full((6, 3), 0.5)),
    "labels of 32 bits": lambda: images(labels=LABELS.int()),
    "labels that are fractions": lambda: images(labels=LABELS.float()),
    "labels in a column": lambda: images(labels=LABELS[:, None]),
    "too few labels": lambda: images(labels=LABELS[:5]),
    "a negative label": lambda: images(labels=labels(0, 0, 0, 0, 0, -1)),
    "a shift of 64 bits": lambda: images(shift=torch.zeros(5).double()),
    "a shift in two dimensions": lambda: images(shift=torch.zeros(5, 1)),
    "a shift nowhere": lambda: images(shift=torch.zeros(5, device="meta")),
    # batches
    "a shift too short": lambda: gradients(images(shift=torch.zeros(4))),
    "a shift too long": lambda: gradients(images(shift=torch.zeros(6))),
    "a label too large": lambda: gradients(images(labels=labels(0, 0, 0, 0, 0, 5))),
    "no labels": lambda: gradients(images(labels=None)),
    "other channels": lambda: gradients(images(torch.zeros(6, 8, 8, 4, dtype=torch.uint8))),
    "too small": lambda: gradients(images(torch.zeros(6, 7, 8, 3, dtype=torch.uint8))),
    "too narrow": lambda: forward(images(torch.zeros(6, 8, 7, 3, dtype=torch.uint8))),
    "too many at once": lambda: gradients(span=(0, 5)),
    "none of them": lambda: gradients(span=(3, 3)),
    "backwards": lambda: gradients(span=(4, 2)),
    "before the first": lambda: gradients(span=(-1, 2)),
    "behind the last": lambda: gradients(span=(4, 7)),
    "outputs behind the last": lambda: forward(span=(4, 7)),
    "outputs before the first": lambda: forward(span=(-2, 2)),
    # parameters
    "too few parameters": lambda: gradients(parameters=torch.zeros(NUMBERS - 1)),
    "too many parameters": lambda: gradients(parameters=torch.zeros(NUMBERS + 1)),
    "parameters in two dimensions": lambda: gradients(parameters=torch.zeros(1, NUMBERS)),
    "parameters of 64 bits": lambda: gradients(parameters=torch.zeros(NUMBERS).double()),
    "parameters of 16 bits": lambda: gradients(parameters=torch.zeros(NUMBERS).half()),
    "parameters not in a row": lambda: gradients(parameters=every_other(NUMBERS)),
    "parameters nowhere": lambda: gradients(parameters=torch.zeros(NUMBERS, device="meta")),
    "too few gradients": lambda: gradients(grads=torch.zeros(NUMBERS - 1)),
    "gradients of 64 bits": lambda: gradients(grads=torch.zeros(NUMBERS).double()),
    "gradients not in a row": lambda: gradients(grads=every_other(NUMBERS)),
    "outputs of too few parameters": lambda: forward(numbers=NUMBERS - 1),
    "backward with too few parameters": lambda: backward(torch.zeros(4, 5), numbers=NUMBERS - 1),
    # gradients of outputs
    "outputs' gradients of too many images": lambda: backward(torch.zeros(5, 5)),
    "outputs' gradients of no image": lambda: backward(torch.zeros(0, 5)),
    "outputs' gradients of other classes": lambda: backward(torch.zeros(4, 4)),
    "outputs' gradients in three dimensions": lambda: backward(torch.zeros(4, 5, 1)),
    "outputs' gradients of 64 bits": lambda: backward(torch.zeros(4, 5).double()),
    "outputs' gradients not in a row": lambda: backward(torch.zeros(5, 4).t()),
    "outputs' gradients nowhere": lambda: backward(torch.zeros(4, 5, device="meta")),
    "backward through feature maps": lambda: backward(
        torch.zeros(4, 4 * 36), spec=SPEC.maps_of("0"), numbers=112
    ),
    "gradients of feature maps": lambda: gradients(
        spec=SPEC.maps_of("0"), parameters=torch.zeros(112), grads=torch.zeros(112)
    ),
    # Hessian products
    "a direction too short": lambda: product(torch.zeros(NUMBERS - 1), torch.zeros(NUMBERS)),
    "a product too short": lambda: product(torch.zeros(NUMBERS), torch.zeros(NUMBERS - 1)),
    "a direction of 64 bits": lambda: product(torch.zeros(NUMBERS).double(), torch.zeros(NUMBERS)),
    "a product not in a row": lambda: product(torch.zeros(NUMBERS), every_other(NUMBERS)),
    # chains
    "no batch": lambda: Chain(SPEC, 0, SIZE),
    "images that do not fit": lambda: Chain(SPEC, 4, (9, 10)),
    "images that vanish": lambda: Chain(SPEC, 4, (3, 8)),
    "a batch of more than 32 bits": lambda: Chain(SPEC, 2**24, SIZE),
    "too many layers": lambda: layers(*(LayerSpec(str(i), 1, 1, (1, 1)) for i in range(MOST_LAYERS))),
    "a kernel too large": lambda: layers(LayerSpec("0", 1, 1, (LARGEST_KERNEL + 1, 1))),
    "an empty layer": lambda: layers(LayerSpec("0", 3, 0, (1, 1)), LayerSpec("1", 0, 1, (1, 1))),
    "no convolution": lambda: Chain(ChainSpec((LayerSpec("0", 3, 2),)), 1, (1, 1)),
}

needs_kernels = pytest.mark.skipif(isinstance(loader.find(), str), reason=f"no kernels here: {loader.find()}")


def passed() -> list[str]:
    """The wrong calls that are not refused."""
    found = []
    for name, call in WRONG.items():
        print(name, file=sys.stderr, flush=True)  # the last one, if C brings Python down
        try:
            call()
        except ValueError:
            continue
        found.append(name)
    return found


@needs_kernels
def test_right_arguments_pass() -> None:
    far = np.full((6, 3), 2**20)
    assert gradients() == pytest.approx(4 * np.log(5))
    assert gradients(images(crops=far, order=np.arange(6, dtype=np.int32)), (2, 6)) > 0
    assert gradients(images(torch.zeros(6, 9, 12, 3, dtype=torch.uint8))) > 0  # more than the chain sees
    assert gradients(images(shift=torch.full((5,), 3.0))) == pytest.approx(4 * np.log(5))
    forward(images(labels=None))  # six images, in batches of four
    backward(torch.zeros(3, 5))
    product(torch.zeros(NUMBERS), torch.zeros(NUMBERS))


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("option", ["-B", "-O"])
def test_wrong_arguments_never_reach_c(option: str) -> None:
    """In a process of its own, which may crash; `-O` disables assertions, and none of the checks."""
    run = [
        sys.executable,
        option,
        "-c",
        "from tests.training.kernels.test_checks import passed; print(passed())",
    ]
    done = subprocess.run(run, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=120)
    assert done.returncode == 0, f"crashed at the last of:\n{done.stderr}"
    assert done.stdout.strip() == "[]"


@needs_kernels
@pytest.mark.parametrize(
    "name", ["a label too large", "too many at once", "too few parameters", "other channels"]
)
def test_a_refusal_says_what_was_expected(name: str) -> None:
    with pytest.raises(ValueError, match=r"the kernels expected .*\d"):
        WRONG[name]()
