"""Help pages, and the lists of commands and methods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from feddumap.cli import main as cli
from feddumap.methods.registry import RECIPES, keys
from tests.support.command_line import CommandLine


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    monkeypatch.setenv("COLUMNS", "80")
    return CommandLine(monkeypatch, capsys)


def pages(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from pages(inner, (*path, name))


PAGES = dict(pages(typer.main.get_command(cli.app)))
GROUPS = [path for path, command in PAGES.items() if hasattr(command, "commands")]
COMMANDS = [path for path in PAGES if path not in GROUPS]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_page_describes_every_parameter(run: CommandLine, path: tuple[str, ...]) -> None:
    code, printed, _ = run(*path, "--help")
    assert code == 0
    assert "\\" not in printed
    arguments = [each for each in PAGES[path].params if each.param_type_name == "argument"]
    assert printed.count("rguments:") == min(1, len(arguments))
    flat = " ".join(printed.split())
    for parameter in PAGES[path].params:
        help_text = getattr(parameter, "help", None)
        assert help_text, parameter.name
        assert " ".join(help_text.split()) in flat


@pytest.mark.parametrize("path", GROUPS, ids=" ".join)
def test_a_list_of_commands_is_not_cut(run: CommandLine, path: tuple[str, ...]) -> None:
    _, printed, _ = run(*path, "--help")
    listed = printed.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == list(PAGES[path].commands)  # type: ignore[attr-defined]
    assert not [line for line in listed if line.endswith("...")]


def test_several_directories_can_be_compared(run: CommandLine) -> None:
    assert "compare [OPTIONS] DIR...\n" in run("compare", "--help")[1]


@pytest.mark.parametrize("given", ["trian", "inspect modle"])
def test_a_near_command_is_named_once(run: CommandLine, given: str) -> None:
    code, _, errors = run(*given.split())
    assert (code, errors.count("Did you mean")) == (2, 1)


def rows(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]


def test_the_list_of_methods_is_short(run: CommandLine) -> None:
    code, printed, _ = run("methods")
    assert code == 0
    assert [name for name, _ in rows(printed) if name] == list(RECIPES)
    assert len(printed.splitlines()) <= 2 * len(RECIPES) + 5
    assert max(map(len, printed.splitlines())) <= 80


def test_a_method_shows_its_keys_and_defaults(run: CommandLine) -> None:
    code, printed, _ = run("methods", "feddum")
    found = {key: default for key, default, _ in rows(printed) if key}
    expected = {f"method.{key}": str(default) for key, _, default, _ in keys("feddum")}
    assert (code, found) == (0, expected)
    assert RECIPES["feddum"].summary in " ".join(printed.split())
    assert "It has no keys." in run("methods", "fedavg")[1]
    code, printed, _ = run("methods", "feddum", "--json")
    assert list(json.loads(printed)) == ["feddum"]
    code, _, errors = run("methods", "feddumm")
    assert (code, "did you mean 'feddum'?" in errors) == (2, True)
