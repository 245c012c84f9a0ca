"""Help pages of commands."""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_type_hints

import click
from typer.core import TyperArgument, TyperCommand
from typer.models import ArgumentInfo


class Command(TyperCommand):
    """A command whose help page describes its arguments, once, and has brackets as they are.

    Click 8.5 has descriptions of arguments too: it deletes those of typer 0.20 and shows a section of its
    own. And typer escapes brackets for rich, which does not show these pages.
    """

    def __init__(self, *given: Any, **keys: Any) -> None:
        super().__init__(*given, **keys)
        described = _descriptions(self.callback)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and not parameter.help:
                parameter.help = described.get(parameter.name or "")

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Nothing: they are beside the options."""

    def get_help(self, ctx: click.Context) -> str:
        return super().get_help(ctx).replace("\\[", "[")


def _descriptions(function: Any) -> dict[str, str | None]:
    """The descriptions of a command's arguments, by their names."""
    hints = get_type_hints(inspect.unwrap(function), include_extras=True)
    return {
        name: each.help
        for name, hint in hints.items()
        for each in get_args(hint)
        if isinstance(each, ArgumentInfo)
    }
