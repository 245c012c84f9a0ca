"""`feddumap export`: files that other programs read, compared here with the model itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from feddumap import export
from feddumap import run as api
from feddumap.cli import main as cli
from feddumap.core.messages import Architecture
from feddumap.data.sources import catalog
from feddumap.data.sources.formats import DIGITS_INPUT
from feddumap.errors import FeddumapError
from feddumap.export import formats
from feddumap.models import architecture, initialise, network
from feddumap.runs.reader import read_checkpoint, read_records
from feddumap.training.samples import to_input
from tests.conftest import small

ROOT = Path(__file__).parents[2]
FILES = {"onnx": "model.onnx", "safetensors": "model.safetensors"}


def untrained(path: Path, shape: Architecture) -> torch.nn.Module:
    """A run directory whose checkpoint is a network of this shape, with weights through which images make a
    difference and batch norms that have seen data."""
    run = api.start(small(model={"name": shape.family}, clock={"profile": "general"}), path)
    weights = initialise(shape, seed=3)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if tensor.dim() > 1:
            tensor.normal_(0, (2 / tensor[0].numel()) ** 0.5, generator=generator)
        elif "running_var" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif tensor.is_floating_point() and tensor.dim():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
    assert run.directory is not None
    run.directory.save(replace(run.state, architecture=shape, weights=weights, steps={}), 0.0)
    run.close()
    return network(shape, weights).eval()


def cut(family: str, widths: Callable[[str, int], int]) -> Architecture:
    full = architecture(family, 10, DIGITS_INPUT)
    return replace(full, channels=tuple((name, widths(name, width)) for name, width in full.channels))


SHAPES = {
    "cnn": architecture("cnn", 10, DIGITS_INPUT),
    "lenet": architecture("lenet", 10, DIGITS_INPUT),
    "vgg11": architecture("vgg11", 10, DIGITS_INPUT),
    # so narrow that models.initialization treats its projections apart
    "resnet18 cut": cut("resnet18", lambda name, width: width // (5 if name.endswith("conv1") else 8)),
    "lenet cut": cut("lenet", lambda name, width: {"conv1": 3, "conv2": 11}[name]),
    "own": architecture("tests.support.own_model:make", 10, DIGITS_INPUT),
}


def ask(path: Path) -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]:
    """An exported file as a stranger would use it: with its runtime alone."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path)
        told = session.get_modelmeta().custom_metadata_map["feddumap"]
        return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), json.loads(told)
    with safe_open(path, "pt") as file:
        told = file.metadata()["feddumap"]
    return export.load(path)[0], json.loads(told)


SLOW = ("cnn", "vgg11", "resnet18 cut")


@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SHAPES]
)
def test_files_answer_as_the_model(home: Path, tmp_path: Path, shape: str) -> None:
    model = untrained(tmp_path / "run", SHAPES[shape])
    generator = torch.Generator().manual_seed(5)
    batches = [SHAPES[shape].input.random(count, generator) for count in (5, 3, 1)]
    with torch.inference_mode():
        answers = [model(images) for images in batches]
    largest = max(float(answer.abs().max()) for answer in answers)
    assert answers[0].std(dim=0).max() > 0.01 * largest  # the model tells images apart
    for to, name in FILES.items():
        written = export.write(tmp_path / "run", to)
        assert written.path == tmp_path / "run" / name
        assert (written.random, written.test) == (10, 32)
        assert written.difference <= 2e-5 * max(1, largest)
        ask_it, told = ask(written.path)
        with torch.inference_mode():
            for images, expected in zip(batches, answers, strict=True):
                torch.testing.assert_close(ask_it(images), expected, rtol=0, atol=2e-5 * largest)
        assert told["classes"] == [str(digit) for digit in range(10)]
        assert told["input"]["shape"] == ["batch", *SHAPES[shape].input.shape]
        assert told["input"]["preprocessing"].startswith("bytes / 255")
        assert Architecture.from_json(told["architecture"]) == SHAPES[shape]
        assert str(ROOT).encode() not in written.path.read_bytes()  # nothing about where it was made
    assert not list((tmp_path / "run").glob(".*.tmp"))


def trained(path: Path, method: dict[str, Any], **sections: Any) -> Path:
    api.train(small(method=method, **sections), path)
    return path


@pytest.mark.parametrize("to", FILES)
def test_a_pruned_run(home: Path, tmp_path: Path, to: str) -> None:
    method = {"name": "feddumap", "prune_round": 1, "rate": "fixed", "fixed_rate": 0.6}
    run = trained(tmp_path / "run", method)
    record = read_records(run)[-1]
    out = tmp_path / "elsewhere.bin"
    written = export.write(run, to, out)
    assert written.path == out
    assert not (run / FILES[to]).exists()
    shutil.move(out, out.with_suffix(Path(FILES[to]).suffix))
    answer, told = ask(out.with_suffix(Path(FILES[to]).suffix))
    assert told["run"]["parameters"] == record["parameters"] < 15_626
    assert (
        told["run"] | {"method": "feddumap", "data": "digits", "rounds": 3, "macs": record["macs"]}
        == told["run"]
    )
    assert told["run"]["accuracy"] == record["accuracy"]
    data = catalog.get("digits")
    with torch.inference_mode():
        guesses = (
            answer(to_input(torch.from_numpy(data.test_inputs.copy())).contiguous()).argmax(dim=1).numpy()
        )
    assert np.mean(guesses == data.test_labels) == record["accuracy"]


@pytest.mark.parametrize("name", [pytest.param("imc", marks=pytest.mark.slow), "prunefl"])
def test_a_masked_run(home: Path, tmp_path: Path, name: str) -> None:
    run = trained(
        tmp_path / "run", {"name": name, **({"prune_round": 1} if name == "imc" else {"first_passes": 20})}
    )
    state = read_checkpoint(run / "checkpoint-000003.json").state
    assert state.mask
    left_out = sum(int((~kept).sum()) for kept in state.mask.values())
    assert left_out > 0
    onnx = export.write(run, "onnx")
    assert onnx.metadata.run["parameters"] == 15_626 - left_out
    plain, metadata = export.load(export.write(run, "safetensors").path)
    assert metadata == onnx.metadata
    assert not plain.training
    for key, tensor in plain.state_dict().items():
        assert torch.equal(tensor, state.weights[key])
        if key in state.mask:
            assert not tensor[~state.mask[key]].any()
    answer, _ = ask(onnx.path)
    images = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        torch.testing.assert_close(answer(images), plain(images), rtol=0, atol=2e-5)


def test_a_safetensors_file_is_enough_by_itself(home: Path, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", {"name": "fedavg"})
    path = export.write(run, "safetensors", tmp_path / "kept.safetensors").path
    expected = {name: tensor.clone() for name, tensor in export.load(path)[0].state_dict().items()}
    shutil.rmtree(run)
    model, metadata = export.load(str(path))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert metadata.classes[3] == "3"
    assert metadata.architecture == architecture("lenet", 10, DIGITS_INPUT)

    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(FeddumapError, match="its checksum does not match"):
        export.load(path)
    path.write_bytes(damaged[:5000])
    with pytest.raises(FeddumapError, match=r"cannot read .*kept.safetensors"):
        export.load(path)
    save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(FeddumapError, match="no metadata of a network"):
        export.load(path)
    save_file(
        {"w": torch.zeros(2)},
        path,
        {"feddumap": '{"format": 2}', "digest": formats.digest({"w": torch.zeros(2)})},
    )
    with pytest.raises(FeddumapError, match="its metadata has format 2"):
        export.load(path)
    with pytest.raises(FeddumapError, match=r"cannot read .*absent"):
        export.load(tmp_path / "absent")


def test_damaged_and_missing_checkpoints(home: Path, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", {"name": "fedavg"})
    (run / "checkpoint-000003.safetensors").write_bytes(b"torn")
    said: list[str] = []
    written = export.write(run, "safetensors", say=said.append)
    assert written.metadata.run["rounds"] == 2
    assert written.metadata.run["accuracy"] == read_records(run)[1]["accuracy"]
    assert any("checkpoint-000003.json is damaged" in line and "after 2 rounds" in line for line in said)
    (run / "checkpoint-000002.json").write_text("{")
    with pytest.raises(
        FeddumapError, match=r"has no valid checkpoint .*000003.* is damaged.*000002.* is damaged"
    ):
        export.write(run, "safetensors", force=True)
    assert export.load(written.path)[1].run["rounds"] == 2  # the older file was left alone
    for path in run.glob("checkpoint-*"):
        path.unlink()
    with pytest.raises(FeddumapError, match="has no checkpoint yet"):
        export.write(run, "safetensors")
    with pytest.raises(FeddumapError, match="is not a run directory"):
        export.write(tmp_path, "safetensors")


def test_a_run_in_training_can_be_exported(home: Path, tmp_path: Path) -> None:
    run = api.start(small(), tmp_path / "run")
    rounds = iter(run)
    next(rounds)
    assert export.write(tmp_path / "run", "safetensors").metadata.run["rounds"] == 1
    rounds.close()  # type: ignore[attr-defined]
    run.close()


def test_what_is_refused(home: Path, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", {"name": "fedavg"}, train={"rounds": 1})
    with pytest.raises(FeddumapError, match="unknown format 'onyx': did you mean 'onnx'"):
        export.write(run, "onyx")
    with pytest.raises(
        FeddumapError, match=r"unknown format 'torchscript': known: executorch, onnx, safetensors"
    ):
        export.write(run, "torchscript")
    out = tmp_path / "mine"
    out.write_text("precious")
    with pytest.raises(
        FeddumapError, match="mine exists: choose another --out, or overwrite it with --force"
    ):
        export.write(run, "safetensors", out)
    assert out.read_text() == "precious"
    export.write(run, "safetensors", out, force=True)
    assert export.load(out)[1].run["rounds"] == 1
    with pytest.raises(FeddumapError, match="is a folder"):
        export.write(run, "safetensors", tmp_path)
    with pytest.raises(FeddumapError, match="absent does not exist"):
        export.write(run, "safetensors", tmp_path / "absent" / "model")


def wrong(predict: formats.Predict, images: torch.Tensor) -> torch.Tensor:
    return predict(images) + 1e-3


def broken(predict: formats.Predict, images: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel\nat all")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (wrong, "differ from the model's by 0.001, expected at most"),
        (broken, r"cannot be used \(no kernel\)"),
    ],
)
def test_a_mismatch_leaves_no_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, message: str
) -> None:
    untrained(tmp_path / "run", SHAPES["lenet"])
    good = formats.FORMATS["safetensors"]

    def decode(path: Path) -> tuple[formats.Predict, formats.Metadata]:
        assert path.exists()  # it is the file itself that is compared
        predict, metadata = good.decode(path)
        return lambda images: fault(predict, images), metadata

    before = sorted((tmp_path / "run").iterdir())
    monkeypatch.setitem(formats.FORMATS, "safetensors", replace(good, decode=decode))
    with pytest.raises(FeddumapError, match=message):
        export.write(tmp_path / "run", "safetensors")
    assert sorted((tmp_path / "run").iterdir()) == before


def test_a_model_that_diverged(home: Path, tmp_path: Path) -> None:
    run = api.start(small(), tmp_path / "run")
    weights = dict(run.state.weights)
    weights["fc3.bias"] = torch.full((10,), torch.inf)
    assert run.directory is not None
    run.directory.save(replace(run.state, weights=weights), 0.0)
    run.close()
    with pytest.raises(FeddumapError, match="outputs that are not finite"):
        export.write(tmp_path / "run", "safetensors")
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_missing_package_is_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(FeddumapError, match=r"needs the package onnxscript.*pip install onnx onnxscript"):
        export.write(tmp_path, "onnx")
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(FeddumapError, match=r"needs the package executorch.*pip install executorch"):
        export.write(tmp_path, "executorch")


def test_class_names_of_ones_own_data(home: Path, tmp_path: Path) -> None:
    digits = catalog.get("digits")
    keep = {split: getattr(digits, f"{split}_labels") < 3 for split in ("train", "test")}
    arrays = {
        f"{split}_{what}": getattr(digits, f"{split}_{what}")[keep[split]]
        for split in keep
        for what in ("inputs", "labels")
    }
    data = tmp_path / "own.npz"
    np.savez(data, classes=np.array(["null", "één", "two"]), **arrays)
    config = small(data={"name": str(data), "server_classes": 2, "shards_per_device": 1}, train={"rounds": 1})
    api.train(config, tmp_path / "run")
    said: list[str] = []
    written = export.write(tmp_path / "run", "onnx", say=said.append)
    assert written.metadata.classes == ("null", "één", "two")
    assert ask(written.path)[1]["run"]["data"] == "own.npz"
    assert (said, written.test) == ([], 32)
    data.unlink()
    written = export.write(tmp_path / "run", "safetensors", say=said.append)
    assert (written.metadata.classes, written.test) == (("0", "1", "2"), 0)
    assert "own.npz is not cached: classes are numbered" in said[0]


def test_a_published_set_that_is_not_cached(home: Path, tmp_path: Path) -> None:
    untrained(tmp_path / "run", SHAPES["lenet"])
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace('name = "digits"', 'name = "cifar10"'))
    said: list[str] = []
    written = export.write(tmp_path / "run", "safetensors", say=said.append)
    assert (written.metadata.classes[3], written.test) == ("cat", 0)
    assert said == ["cifar10 is not cached: outputs are compared on random inputs only"]
    path.write_text(path.read_text().replace('name = "cifar10"', 'name = "cifar100"'))
    with pytest.raises(FeddumapError, match="cifar100 has 100 classes, the model 10"):
        export.write(tmp_path / "run", "safetensors", force=True)


def test_the_command(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    untrained(tmp_path / "run", SHAPES["lenet cut"])

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["feddumap", "export", str(tmp_path / "run"), *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, captured.out, captured.err

    code, printed, _ = call("--to", "safetensors")
    assert code == 0
    assert "model.safetensors: lenet after 0 rounds, " in printed
    assert (
        "compared with the model on 32 test images and 10 random images: largest difference 0, largest output"
        in printed
    )
    code, _, errors = call("--to", "safetensors")
    assert (code, "--force" in errors, errors.count("\n")) == (2, True, 1)
    code, _, errors = call("--to", "keras")
    assert (code, "unknown format 'keras'" in errors, errors.count("\n")) == (2, True, 1)


@pytest.mark.slow
def test_the_example_predicts_without_torch(home: Path, tmp_path: Path) -> None:
    run = trained(
        tmp_path / "run", {"name": "fedavg"}, train={"rounds": 20, "cohort": 6}, data={"partition": "iid"}
    )
    model = export.write(run, "onnx").path
    digits = catalog.get("digits")
    network_, metadata = export.load(export.write(run, "safetensors").path)
    names = []
    for index in range(3):
        names.append(f"{index}.png")
        Image.fromarray(digits.test_inputs[index, ..., 0]).save(tmp_path / names[-1])
    Image.fromarray(digits.test_inputs[0, ..., 0]).resize((64, 48)).convert("RGB").save(
        tmp_path / "large.png"
    )
    block = (
        "import sys, runpy; sys.modules['torch'] = sys.modules['feddumap'] = None; sys.argv = sys.argv[1:]; "
    )
    command = [sys.executable, "-c", block + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    example = str(ROOT / "examples" / "predict.py")

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, example, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    done = call(str(model), *names, "large.png", "--top", "10")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "large.png: resized from 64×48 to 16×16\n"
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    with torch.inference_mode():
        inputs = to_input(torch.from_numpy(digits.test_inputs[:3].copy()))
        chances = torch.softmax(network_(inputs), dim=1)
    for index, line in enumerate(lines[:3]):
        file, _, rest = line.partition(": ")
        found = {part.split()[0]: float(part.split()[1].rstrip("%")) / 100 for part in rest.split(", ")}
        assert file == names[index]
        assert next(iter(found)) == metadata.classes[int(chances[index].argmax())]
        for place, name in enumerate(metadata.classes):
            assert found[name] == pytest.approx(float(chances[index, place]), abs=6e-4)
    assert call("absent.onnx", "0.png").returncode == 1
    done = call(str(model), "absent.png")
    assert "cannot read the image absent.png" in done.stderr


@pytest.mark.parametrize("shape", ["cnn", "lenet cut", "vgg11", "resnet18 cut"])
def test_executorch(home: Path, tmp_path: Path, shape: str) -> None:
    pytest.importorskip("executorch", reason="the extra executorch is not installed")
    from executorch.runtime import Runtime

    model = untrained(tmp_path / "run", SHAPES[shape])
    written = export.write(tmp_path / "run", "executorch")
    assert written.path.name == "model.pte"
    assert (written.random, written.test) == (10, 32)
    program = Runtime.get().load_program(written.path)
    told = json.loads(program.load_method("feddumap").execute([])[0])
    assert told["classes"] == [str(digit) for digit in range(10)]
    assert told["input"]["shape"] == [1, *SHAPES[shape].input.shape]
    forward = program.load_method("forward")
    for seed in range(3):
        image = SHAPES[shape].input.random(1, torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            expected = model(image)
        largest = float(expected.abs().max())
        torch.testing.assert_close(forward.execute([image])[0], expected, rtol=0, atol=2e-5 * largest)
