"""Sections, keys, defaults and the sentences about mistakes."""

from pathlib import Path

import pytest
import tomli_w

from feddumap.config import Config, describe, load
from feddumap.core import clock
from feddumap.errors import FeddumapError
from feddumap.methods.registry import RECIPES, resolve

ROOT = Path(__file__).parents[1]


def test_defaults_are_the_papers() -> None:
    config = Config()
    assert (config.data.devices, config.train.cohort, config.train.rounds) == (100, 10, 500)
    assert (config.train.epochs, config.train.batch) == (5, 10)
    assert (config.train.lr, config.train.lr_decay) == (0.1, 0.99)
    assert (config.data.server_fraction, config.data.partition) == (0.1, "shards")
    assert clock.resolve(config.clock, config.model.name).profile == "paper"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.round=3", "unknown key train.round: did you mean train.rounds? Allowed: rounds, cohort"),
        ("trian.rounds=3", "unknown section trian: did you mean train?"),
        ("train.rounds=abc", "train.rounds = 'abc': input should be a valid integer"),
        ("train.rounds=1.5", "train.rounds = 1.5: input should be a valid integer"),
        ("train.rounds=0", "train.rounds = 0: input should be greater than or equal to 1"),
        ("train.rounds=true", "train.rounds = True: input should be a valid integer"),
        ("train.lr=0", "train.lr = 0: input should be greater than 0"),
        ("train.lr=-0.1", "train.lr = -0.1: input should be greater than 0"),
        ("train.lr=inf", "train.lr = inf: input should be a finite number"),
        ("train.lr=nan", "train.lr = nan: input should be"),
        ("train.lr=1e300", "train.lr = 1e+300: input should be less than or equal to 1000000"),
        ("train.lr_decay=1.5", "train.lr_decay = 1.5: input should be less than or equal to 1"),
        ("data.server_fraction=2", "data.server_fraction = 2: input should be less than or equal to 1"),
        (
            "data.partition=shard",
            "data.partition = 'shard': expected shards, iid, dirichlet, natural or flwr:",
        ),
        ("data.size=[1]", "data.size = [1]: expected a number of pixels, or [height, width]"),
        ("clock.profile=fast", "clock.profile = 'fast': input should be 'paper' or 'general'"),
        ("run.seed=-1", "run.seed = -1: input should be greater than or equal to 0"),
        ("train.rounds", "expected section.key=value"),
        ("rounds=3", "expected section.key=value"),
        ("train=3", "expected section.key=value"),
    ],
)
def test_a_mistake_names_key_value_and_what_was_expected(setting: str, message: str) -> None:
    with pytest.raises(FeddumapError) as caught:
        load(None, [setting])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_method_keys_belong_to_the_method() -> None:
    with pytest.raises(FeddumapError, match=r"unknown method 'fedavgg': did you mean 'fedavg'\?"):
        resolve(load(None, ["method.name=fedavgg"]).method)
    with pytest.raises(FeddumapError, match=r"unknown key method.c: fedavg has no keys"):
        resolve(load(None, ["method.c=1"]).method)


def test_values_are_toml_and_bare_words_are_text() -> None:
    config = load(None, ["model.name=lenet", "train.lr=1", "run.targets=[0.5, 0.6]", "data.augment=false"])
    assert config.model.name == "lenet"
    assert (config.train.lr, config.run.targets, config.data.augment) == (1.0, [0.5, 0.6], False)


def test_later_settings_win_over_earlier_ones_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[train]\nrounds = 7\nbatch = 3\n")
    config = load(path, ["train.rounds=8", "train.rounds=9"])
    assert (config.train.rounds, config.train.batch) == (9, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train\n", "is not valid TOML"),
        ("train = 3\n", "train = 3: "),
        ("[train]\nlr = '0.1'\n", "train.lr = '0.1': input should be a valid number"),
    ],
)
def test_a_bad_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(FeddumapError) as caught:
        load(path)
    assert message in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FeddumapError, match=r"cannot read the configuration .*none.toml: No such file"):
        load(tmp_path / "none.toml")


def test_toml_round_trip(tmp_path: Path) -> None:
    config = load(None, ["run.target=0.5", "method.name=fedavg", "data.alpha=0.25"])
    path = tmp_path / "c.toml"
    path.write_text(tomli_w.dumps(config.to_toml()))
    assert load(path) == config


def test_every_key_is_described() -> None:
    rows = describe()
    assert len(rows) == sum(len(field.annotation.model_fields) for field in Config.model_fields.values())
    for key, kind, _, text in rows:
        assert kind, key
        assert len(text) > 3, key


SHIPPED = [path for path in sorted((ROOT / "configs").glob("*.toml")) if "[grid]" not in path.read_text()]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    config = load(path)
    assert config.method.name in RECIPES
    resolve(config.method)
