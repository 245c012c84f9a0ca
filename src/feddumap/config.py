"""The whole configuration: reading, checking and changing it. Its sections are in `config_sections.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from feddumap.config_sections import RUNTIME_KEYS as RUNTIME_KEYS
from feddumap.config_sections import AggregateConfig as AggregateConfig
from feddumap.config_sections import AttackConfig as AttackConfig
from feddumap.config_sections import ClockConfig as ClockConfig
from feddumap.config_sections import DataConfig as DataConfig
from feddumap.config_sections import MethodConfig as MethodConfig
from feddumap.config_sections import ModelConfig as ModelConfig
from feddumap.config_sections import PrivacyConfig as PrivacyConfig
from feddumap.config_sections import RunConfig as RunConfig
from feddumap.config_sections import Section as Section
from feddumap.config_sections import TrainConfig as TrainConfig
from feddumap.errors import FeddumapError, show
from feddumap.system.json_text import parse_toml


class Config(Section):
    """The complete configuration of a run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    train: TrainConfig = TrainConfig()
    clock: ClockConfig = ClockConfig()
    aggregate: AggregateConfig = AggregateConfig()
    attack: AttackConfig = AttackConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    run: RunConfig = RunConfig()

    @staticmethod
    def parse(value: Mapping[str, Any]) -> Config:
        """Validate nested mappings; an error names each invalid key."""
        try:
            return Config.model_validate(value)
        except ValidationError as error:
            raise FeddumapError("; ".join(explain(detail) for detail in error.errors())) from None

    def replace(self, **sections: Mapping[str, Any]) -> Config:
        """A copy with some keys changed: `config.replace(train={"rounds": 3})`."""
        value = self.model_dump(exclude_unset=True)  # what is left to its default remains so
        for section, keys in sections.items():
            value.setdefault(section, {}).update(keys)
        return Config.parse(value)

    def to_toml(self) -> dict[str, Any]:
        """Nested mappings without unset keys, since TOML has no null."""
        return self.model_dump(exclude_none=True)


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """The tables of a TOML file; `kind` names the file in errors."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FeddumapError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise FeddumapError(f"cannot read the {kind} {path}: {error.strerror}") from None


def load(path: Path | None, sets: Iterable[str] = ()) -> Config:
    """Read a TOML file (or take the defaults) and apply `section.key=value` settings in order."""
    value = read_toml(path, "configuration") if path is not None else {}
    for text in sets:
        name, equals, raw = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            raise FeddumapError(f"--set {show(text)}: expected section.key=value, such as train.rounds=20")
        table = value.setdefault(section, {})
        if not isinstance(table, dict):
            raise FeddumapError(f"{section} = {show(table)}: expected a section, such as [{section}]")
        table[key] = _toml_value(raw.strip(), text)
    return Config.parse(value)


def _toml_value(raw: str, given: str) -> Any:
    try:
        return parse_toml(f"value = {raw}")["value"]
    except TOMLDecodeError:
        return raw  # a bare word is a string: --set model.name=lenet
    except ValueError as error:
        raise FeddumapError(f"--set {show(given)} is not a value of TOML: {error}") from None


def explain(detail: ErrorDetails, prefix: str = "") -> str:
    """The message of a pydantic error: the key, the value and what was expected."""
    path = [str(part) for part in detail["loc"]]
    key = prefix + ".".join(path)
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        allowed = _allowed(path[:-1])
        near = get_close_matches(path[-1], allowed, n=1)
        hint = f"did you mean {prefix}{'.'.join([*path[:-1], near[0]])}? Allowed" if near else "allowed"
        kind = "section" if len(path) == 1 and not prefix else "key"
        return f"unknown {kind} {key}: {hint}: {', '.join(allowed)}"
    message = detail["msg"].removeprefix("Value error, ")
    value = detail["input"]
    return f"{key} = {show(value)}: {message[0].lower()}{message[1:]}"


def _allowed(path: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in path:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type)
        model = annotation
    return list(model.model_fields)


def describe() -> list[tuple[str, str, str, str]]:
    """Every key as (section.key, allowed values, default, description), for the help of the command line."""
    rows = []
    for section, field in Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        for key, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True)
            shown = (
                "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            )
            rows.append((f"{section}.{key}", type_name(info.annotation), shown, info.description or ""))
    return rows


def type_name(annotation: Any) -> str:
    """The name of a field's type.

    >>> from typing import Literal
    >>> type_name(int), type_name(Literal["a", "b"]), type_name(float | None)
    ('int', 'a | b', 'float')
    """
    arguments = getattr(annotation, "__args__", ())
    metadata = getattr(annotation, "__metadata__", None)
    if metadata is not None:
        return type_name(annotation.__origin__)
    if arguments and getattr(annotation, "__origin__", None) is list:
        return f"list of {type_name(arguments[0])}"
    if arguments and all(isinstance(argument, str) for argument in arguments):
        return " | ".join(arguments)
    if arguments:
        return " | ".join(type_name(argument) for argument in arguments if argument is not type(None))
    return {"str": "text"}.get(getattr(annotation, "__name__", ""), getattr(annotation, "__name__", ""))
