"""Flags of several commands: settings, an application's name and place, the fields of a model."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from greenroom.actors.runtime.records import folder_of_port
from greenroom.actors.runtime.settings import (
    FIELDS,
    HostSettings,
    described,
    given_fields,
    read_settings,
)
from greenroom.core.errors import InvalidRequestError, UnknownNameError


class Number(click.FloatRange):
    """A finite number within bounds."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return it; UsageError for what is none."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class _New(click.Path):
    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        path: Any = super().convert(value, param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{str(path)!r}: there is no folder {path.parent}; make it", param, ctx)
        return path


HERE = ("state_dir", "admin_port")  # either of them says which system of this host is meant
ANYWHERE = (*HERE, "address", "key_file")
FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)
NEW = _New(path_type=Path, dir_okay=False)
ABOVE_0 = Number(0, min_open=True)
EXISTING = click.Path(path_type=Path, dir_okay=False, exists=True)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, with every field.")


class BadValueError(click.ClickException):
    """What was given is wrong, though the command was used right: no usage is shown."""

    exit_code = click.UsageError.exit_code


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turn an InvalidRequestError, or one for a name, into an error of what the user gave."""
    try:
        yield
    except (InvalidRequestError, UnknownNameError) as error:
        raise BadValueError(str(error)) from error


def confirm(loss: str, *, is_sure: bool) -> None:
    """Ask for what cannot be undone, unless that was said; UsageError where nobody can answer."""
    if not is_sure and not sys.stdin.isatty():
        raise click.UsageError(f"{loss}. Give --yes to do so where nobody can be asked")
    if not is_sure:
        click.confirm(f"{loss[0].upper()}{loss[1:]}. Do it?", abort=True)


def settings_from(flags: dict[str, Any]) -> HostSettings:
    """Read flags and environment; a bad value is the user's error, so exit code 2."""
    with reading():
        return read_settings(**flags)


class _Command(click.Command):
    takes: Collection[str] = ()

    def invoke(self, ctx: click.Context) -> Any:
        flags = {name: ctx.params.pop(name) for name in self.takes}
        settings, given = settings_from(flags), given_fields(**flags)
        if tuple(self.takes) == HERE and "state_dir" not in given:
            # The port says which system is meant: its files are wherever it was started with.
            found = folder_of_port(settings.admin_port)
            settings = settings.model_copy(update={"state_dir": found or settings.state_dir})
        ctx.params["settings"], ctx.obj = settings, given
        return super().invoke(ctx)


def command(
    *takes: str, leaves_out: Collection[str] = (), **kwargs: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command with settings among its flags; it gets them as ``settings``.

    Of all settings it takes those in ``takes``, or all but ``leaves_out``. In the context's ``obj``
    are the names of those that are given.
    """
    names = [name for name in takes or FIELDS if name not in leaves_out]

    def decorate(function: Callable[..., Any]) -> click.Command:
        made = click.command(cls=_Command, **kwargs)(function)
        made.takes = names
        made.params += map(_setting, names)
        return made

    return decorate


def _setting(name: str) -> click.Option:
    flag = name.replace("_", "-")
    if FIELDS[name].annotation is bool and FIELDS[name].default is False:
        return click.Option([f"--{flag}", name], flag_value="true", help=described(FIELDS[name]))
    metavar = flag.rpartition("-")[2].upper()
    return click.Option([f"--{flag}", name], metavar=metavar, help=described(FIELDS[name]))


def fields_of(model: type[BaseModel], *leaves_out: str) -> Callable[..., Callable[..., Any]]:
    """Add a flag for each field; the command gets those that are given, by name, as ``fields``."""
    fields = {n: field for n, field in model.model_fields.items() if n not in leaves_out}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def gathered(*args: Any, **given: Any) -> Any:
            found = {name: given.pop(name) for name in fields}
            found = {n: v for n, v in found.items() if not (v is None or v is False or v == ())}
            return function(*args, fields=found, **given)

        command: Callable[..., Any] = gathered
        for name, field in reversed(fields.items()):
            command = _field(name, field)(command)
        return command

    return decorate


_KINDS: dict[Any, type] = {int: int, int | None: int, float: float, float | None: float}


def _field(name: str, field: FieldInfo) -> Callable[[Any], Any]:
    return click.option(
        f"--{name.replace('_', '-')}",
        type=_KINDS.get(field.annotation, str),
        is_flag=field.annotation is bool or None,  # False lets an option lack its value
        multiple=field.annotation in (tuple[str, ...], dict[str, float]),
        help=described(field),
    )
