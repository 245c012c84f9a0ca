"""Where a run starts: the weights of the user's own network, or those of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from feddumap import run as api
from feddumap.core.tensors import digest
from feddumap.data.sources.formats import DIGITS_INPUT
from feddumap.errors import FeddumapError
from feddumap.models import architecture, initialise
from tests.conftest import small


def pretrained(classes: int) -> nn.Module:
    """A network whose factory sets its weights."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, classes))
    nn.init.constant_(net[0].weight, 0.25)
    nn.init.constant_(net[3].bias, 3.0)
    return net


OWN = f"{__name__}:pretrained"


def test_a_network_of_ones_own_keeps_the_weights_of_its_factory() -> None:
    shape = architecture(OWN, 10, DIGITS_INPUT)
    first, again, other = initialise(shape, 1), initialise(shape, 1), initialise(shape, 2)
    assert torch.equal(first["0.weight"], torch.full((4, 1, 3, 3), 0.25))
    assert torch.equal(first["3.bias"], torch.full((10,), 3.0))
    assert digest(first) == digest(again)
    assert not torch.equal(first["3.weight"], other["3.weight"])  # random ones follow the run's seed
    before = torch.random.get_rng_state()
    initialise(shape, 1)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    weights = {
        name: tensor + 0.01 for name, tensor in initialise(architecture("lenet", 10, DIGITS_INPUT), 5).items()
    }
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_a_run_starts_from_a_file_and_does_not_need_it_again(
    home: object, file: Path, tmp_path: Path
) -> None:
    config = small(model={"weights": str(file)}, train={"rounds": 2})
    expected = api.train(config)
    assert digest(expected.state.weights) != digest(api.train(small(train={"rounds": 2})).state.weights)
    run = api.start(config, tmp_path / "run")
    given = {name: t + 0.01 for name, t in initialise(architecture("lenet", 10, DIGITS_INPUT), 5).items()}
    assert digest(run.state.weights) == digest(given)
    run.close()
    file.unlink()
    again = api.resume(tmp_path / "run")
    assert again.state.round == 0
    again.run().close()
    assert digest(again.state.weights) == digest(expected.state.weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("conv1.bias"), r"has no tensor conv1.bias"),
        (lambda w: w.update({"extra": torch.zeros(1)}), r"has a tensor extra, which this network has not"),
        (lambda w: w.update({"fc3.bias": torch.zeros(11)}), r"fc3.bias is float32 \[11\], expected"),
        (lambda w: w.update({"fc3.bias": torch.zeros(10).double()}), r"fc3.bias is float64 \[10\], expected"),
        (lambda w: w["fc3.bias"].fill_(torch.nan), r"holds NaN or infinite numbers"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(
    home: object, tmp_path: Path, change: object, message: str
) -> None:
    weights = {n: t.contiguous() for n, t in initialise(architecture("lenet", 10, DIGITS_INPUT), 5).items()}
    change(weights)  # type: ignore[operator]
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(FeddumapError, match=message):
        api.start(small(model={"weights": str(tmp_path / "w.safetensors")}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_none_is_refused(home: object, tmp_path: Path) -> None:
    (tmp_path / "w").write_text("no tensors")
    for path in ("w", "missing"):
        with pytest.raises(
            FeddumapError, match=r"model.weights = .* cannot be read .*: give a safetensors file"
        ):
            api.start(small(model={"weights": str(tmp_path / path)}))
