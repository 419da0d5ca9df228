"""Comparison of shadows: its settings on their way to the controller, and what it has found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from greenroom.actors.admin_messages import GetDifferences
from greenroom.actors.connection import Connection
from greenroom.core.comparing import Compare, Response, check_compare
from greenroom.serve.operations import new
from greenroom.serve.packing import pack_code

CompareFunction = Callable[[Response, Response], Any]
SHOWN = 3  # examples of each cause


def packed_compare(what: str, compare: object) -> Compare:
    """Return settings as they travel, a function as bytes; InvalidRequestError otherwise."""
    if isinstance(compare, Compare) or not callable(compare) or not hasattr(compare, "__name__"):
        return check_compare(compare)
    code = pack_code(f"the compare function of {what}", compare, (), {}, None)
    name = f"{compare.__module__}.{getattr(compare, '__qualname__', compare.__name__)}"
    return check_compare({"how": "function", "function": name, "code": code.pickled})


def show(connection: Connection, endpoint: str, *, as_json: bool) -> None:
    """Print what comparing an endpoint's shadows has found."""
    found: dict[str, Any] = connection.request(new(GetDifferences, endpoint=endpoint))
    if as_json:
        click.echo(json.dumps(found, indent=2, default=str))
        return
    if not found:
        click.echo(f"no shadow of {endpoint!r} is compared; see Client.shadow_traffic")
    for shadow, differences in found.items():
        for line in lines_of(shadow, differences):
            click.echo(line)


def lines_of(shadow: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Return what is to be said of one shadow."""
    yield (
        f"{shadow} ({found['by']}): {found['compared']} compared, {found['different']} different, "
        f"{found['not_compared']} not compared"
    )
    for cause in found["causes"]:
        mark = "" if cause["comparable"] else " (not compared)"
        yield f"{cause['count']:>8}  {cause['cause']}{mark}"
        for example in cause["examples"][-SHOWN:]:
            yield f"          {example['request_id']}  {_told(example)}"


def _told(example: Mapping[str, Any]) -> str:
    if example["detail"]:
        return str(example["detail"])
    sides = []
    for side in ("primary", "shadow"):
        answer = example[side]
        said = "no answer" if answer is None else answer["missing"] or repr(answer["body"][:60])
        sides.append(f"{side} {said}")
    return ", ".join(sides)
