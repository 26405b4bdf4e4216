"""A command group that imports a command's module only when the command is called."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


class LazyGroup(TyperGroup):
    """List commands from names and help texts; import the module of the one that is resolved.

    Help and completion of command names need no module, so they stay fast. Derive a class that
    has ``modules``: per command its module, which has a Typer ``app``, and its help text.
    """

    modules: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __init__(self, **options: Any) -> None:
        listed = {name: TyperCommand(name, help=text) for name, (_, text) in self.modules.items()}
        super().__init__(**options | {"commands": listed})

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the name, the command that its module defines, and the remaining arguments."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, load(self.modules[name][0]) if name and listed else None, rest


def load(module: str) -> Any:
    """Return the command that the Typer app of a module defines."""
    command = get_command(importlib.import_module(module).app)
    fill_paragraphs(command)
    return command


def fill_paragraphs(command: Any) -> None:
    """Join the lines of each help paragraph; Typer keeps the line breaks of all but the first.

    Paragraphs with an indented line, such as lists and examples, stay as they are.
    """
    if command.help:
        parts = inspect.cleandoc(command.help).split("\n\n")
        command.help = "\n\n".join(
            part if "\n " in part or part.startswith((" ", "\b")) else part.replace("\n", " ")
            for part in parts
        )
    for each in getattr(command, "commands", {}).values():
        fill_paragraphs(each)
