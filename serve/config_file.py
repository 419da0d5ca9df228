"""Configuration files: YAML or JSON to a document, with the line of each part, and back.

Theory of operation. A file is read twice over: once for its values, once for the lines and columns
of its keys, which errors name. ``${NAME}`` in a value is replaced after that, so no variable can
change the structure. The replaced strings know what was written (:class:`Expanded`), and only that
is shown later.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from greenroom.core.config import Expanded
from greenroom.core.errors import InvalidRequestError
from greenroom.core.validation import Place, with_place
from greenroom.serve.schema import InvalidDocumentError

SCHEMA_FILE = "greenroom.schema.json"
_VARIABLE = re.compile(r"\$(\$\{|\{(?P<name>[A-Za-z_]\w*)(:-(?P<default>[^}]*))?\}|\{[^}]*\}?)")


class ConfigFile:
    """A file that was read: its document, and where each part of it stands.

    Raises InvalidRequestError, with line and column, where it is no YAML or JSON, a key stands
    twice, or a variable is not set. ``text`` is what the file holds, where it is not at ``path``.
    """

    def __init__(
        self, path: Path, environ: Mapping[str, str] = os.environ, text: str | None = None
    ) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8") if text is None else text
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidRequestError(f"{path}: cannot be read: {reason}") from None
        self._root, value = (_read_json if path.suffix == ".json" else _read_yaml)(path, text)
        with self.located():
            self.document = _expanded(value, environ)

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Put file, line and column before each problem of an InvalidDocumentError."""
        try:
            yield
        except InvalidDocumentError as error:
            placed = sorted(
                (*self._position(place), with_place(place, text)) for place, text in error.problems
            )
            lines = (f"{self.path}:{line}:{column}: {text}" for line, column, text in placed)
            raise InvalidRequestError("\n".join(lines)) from error.__cause__

    def _position(self, place: Place) -> tuple[int, int]:
        """Return line and column of a part's key, or of the nearest part around it."""
        node, mark = self._root, None
        for part in place:
            if isinstance(node, yaml.MappingNode):
                found = [(k.start_mark, v) for k, v in node.value if k.value == str(part)]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                found = [(each.start_mark, each) for each in node.value[part : part + 1]]
            else:
                found = []
            if not found:
                break
            mark, node = found[0]
        return (1, 1) if mark is None else (mark.line + 1, mark.column + 1)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it ships no types
    """Refuses a key that stands twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    text = f"the key {key.value!r} stands twice"
                    mark = key.start_mark
                    raise yaml.constructor.ConstructorError(problem=text, problem_mark=mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path, text: str) -> tuple[yaml.Node | None, Any]:
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or str(error)
        raise InvalidRequestError(f"{path}{where}: not YAML: {reason}") from None
    except (ValueError, RecursionError) as error:  # a date that is none; depth
        raise InvalidRequestError(f"{path}: not YAML: {error}") from None


def _read_json(path: Path, text: str) -> tuple[yaml.Node | None, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise InvalidRequestError(f"{where}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path}: not JSON: {error}") from None
    # JSON is YAML but for tabs, so far as lines and columns are concerned.
    with contextlib.suppress(yaml.YAMLError, RecursionError):
        return yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader), value
    return None, value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the key {twice[0]!r} stands twice")
    return dict(pairs)


# --- Variables ------------------------------------------------------------------------------------


def _expanded(document: Any, environ: Mapping[str, str]) -> Any:
    """Return the document with its variables replaced; all that are not set are one error."""
    problems: list[tuple[Place, str]] = []

    def expand(value: Any, place: Place) -> Any:
        if isinstance(value, dict):
            return {key: expand(part, (*place, key)) for key, part in value.items()}
        if isinstance(value, list):
            return [expand(part, (*place, number)) for number, part in enumerate(value)]
        if isinstance(value, str) and "${" in value:
            text, wrong = _with_variables(value, environ)
            problems.extend((place, each) for each in wrong)
            return Expanded(text, value)
        return value

    try:
        expanded = expand(document, ())
    except RecursionError:
        raise InvalidDocumentError([((), "nested too deep, or in itself")]) from None
    if problems:
        raise InvalidDocumentError(problems)
    return expanded


def variables_in(text: str) -> dict[str, str]:
    """Return the variables of this process that a file's text names."""
    names = {match["name"] for match in _VARIABLE.finditer(text)}
    return {name: value for name, value in os.environ.items() if name in names}


def _with_variables(text: str, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    problems = []

    def value_of(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if match[0] == "$${":
            return "${"
        if name is None:
            problems.append(f"{match[0]!r}: must be ${{NAME}} or ${{NAME:-default}}; $${{ for ${{")
        elif default is not None:
            return environ.get(name) or default
        elif name not in environ:
            problems.append(f"the variable {name} is not set; set it, or say ${{{name}:-default}}")
        return environ.get(name or "", "")

    return _VARIABLE.sub(value_of, text), problems


# --- Writing --------------------------------------------------------------------------------------


def written(document: Mapping[str, Any]) -> str:
    """Return a document as the text of a YAML file."""
    head = (
        f"# For editors: greenroom schema > {SCHEMA_FILE}\n"
        f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
    )
    return head + str(
        yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=100)
    )
