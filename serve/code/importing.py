"""From what the command line names, ``module:attribute``, to an application."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from greenroom.actors.replica.modules import is_users, users_traceback
from greenroom.core.errors import GreenroomError, InvalidRequestError
from greenroom.core.validation import suggestion, validated
from greenroom.serve.build import not_an_application
from greenroom.serve.deployments import Application, Deployment

DEFAULT_ATTRIBUTE = "app"


class ImportFailedError(GreenroomError):
    """The user's module could not be imported; ``traceback`` shows where in it."""

    def __init__(self, text: str, traceback: str) -> None:
        super().__init__(text)
        self.traceback = traceback


def load_application(target: str, app_dir: Path, arguments: Mapping[str, Any]) -> Application:
    """Import the module with ``app_dir`` first on sys.path; build what its attribute names.

    The attribute is an Application, or a function that gets ``arguments`` and returns one. Raises
    ImportFailedError where the user's code raises, InvalidRequestError where nothing fits.
    """
    module_name, _, attribute = target.partition(":")
    check_module(target, app_dir)
    folder = str(app_dir.resolve())
    _check_own_name(app_dir)
    if folder in sys.path:  # behind that of another application
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    module = _import(module_name, folder)
    value = _attribute(module, attribute or DEFAULT_ATTRIBUTE)
    return _application(value, f"{module_name}:{attribute or DEFAULT_ATTRIBUTE}", arguments)


def check_module(target: str, app_dir: Path) -> None:
    """Raise InvalidRequestError where no such module can be imported; nothing is imported here."""
    name = target.partition(":")[0]
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        raise InvalidRequestError(f"{target!r}: expected MODULE or MODULE:ATTRIBUTE{_hint(name)}")
    folder, first = str(app_dir.resolve()), name.partition(".")[0]
    sys.path.insert(0, folder)
    try:
        is_there = first in sys.modules or importlib.util.find_spec(first) is not None
    finally:
        sys.path.remove(folder)
    if not is_there:
        raise InvalidRequestError(_not_found(name, first, folder))


def _check_own_name(app_dir: Path) -> None:
    """Refuse a package or module of the user's that bears the name of ours: one hides the other."""
    for found in (app_dir / "greenroom", app_dir / "greenroom.py"):
        if found.suffix == ".py" and found.is_file():
            break
        if found.is_dir() and (any(found.glob("*.py")) or (found / "serve").is_dir()):
            break
    else:
        return
    raise InvalidRequestError(
        f"{str(found.resolve())!r} has the name of the installed package greenroom, and one of the "
        "two would hide the other; rename it, or name another folder with --app-dir"
    )


def read_arguments(pairs: Sequence[str]) -> dict[str, str]:
    """Read ``key=value`` words."""
    bad = [pair for pair in pairs if not pair.partition("=")[1] or pair.startswith("=")]
    if bad:
        raise InvalidRequestError(
            f"{bad[0]!r}: expected key=value, an argument of the app's builder"
        )
    return dict(pair.split("=", 1) for pair in pairs)


def forget_modules(app_dir: Path) -> None:
    """Drop the modules of the folder, so that the next import reads their files again."""
    folder = app_dir.resolve()
    for name, module in list(sys.modules.items()):
        own = name != "__main__" and is_users(module)
        if own and folder in Path(str(module.__file__)).parents:
            del sys.modules[name]
    importlib.invalidate_caches()


def _import(name: str, folder: str) -> ModuleType:
    # User code says ``import starlette`` and then starlette.requests.Request: Ray has imported it.
    importlib.import_module("starlette.requests")
    importlib.import_module("starlette.responses")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself, or a package it is in; else the user's own import is what failed.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, error) from error
        raise InvalidRequestError(_not_found(name, error.name, folder)) from None
    except (Exception, SystemExit) as error:  # the user's module may do anything
        raise _failed(name, error) from error


def _hint(name: str) -> str:
    if name.endswith(".py") or "/" in name:
        dotted = name.removesuffix(".py").strip("./").replace("/", ".")
        return f", not a file; try {dotted!r}"
    return ""


def _is_in(folder: Path, names: list[str]) -> bool:
    """Return whether a folder has a package or module of these names, as far as two go."""
    path = folder.joinpath(*names[:2])
    is_regular = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    return is_regular or (len(names) > 1 and path.is_dir())


def _not_found(name: str, missing: str, folder: str) -> str:
    inside = [*Path(folder).glob("*.py"), *(each.parent for each in Path(folder).glob("*/*.py"))]
    found = sorted({path.stem for path in inside if path.stem.isidentifier()})
    for place in ("src", ".."):
        if _is_in(Path(folder, place), name.split(".")):
            return f"no module named {missing!r} in {folder}; it is found with --app-dir {place}"
    module, _, attribute = name.rpartition(".")
    # As Ray Serve writes it. None, where no such module is loaded, has attributes of its own.
    if attribute in getattr(sys.modules.get(module), "__dict__", ()):
        there = f"; it is an attribute of {module}: try {module + ':' + attribute!r}"
    else:
        there = suggestion(name, found) or f"; it has: {_listed(found)}"
    return f"no module named {missing!r} in {folder} (see --app-dir) or on sys.path{there}"


def _failed(name: str, error: BaseException) -> ImportFailedError:
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    return ImportFailedError(f"importing {name!r} failed: {reason}", users_traceback(error))


def _attribute(module: ModuleType, attribute: str) -> Any:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise InvalidRequestError(
                f"module {module.__name__!r} has no attribute {attribute!r}; {_candidates(module)}"
            )
        value = getattr(value, part)
    return value


def _candidates(module: ModuleType) -> str:
    names = vars(module).items()
    apps = [name for name, value in names if isinstance(value, Application)]
    if apps:
        return f"its applications: {_listed(apps)}"
    unbound = [name for name, value in names if isinstance(value, Deployment)]
    if unbound:
        return f"it has deployments, which are not bound: {_listed(unbound)}; add app = X.bind()"
    builders = [n for n, v in names if inspect.isfunction(v) and v.__module__ == module.__name__]
    return f"it has no application; its functions: {_listed(builders)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _application(value: Any, what: str, arguments: Mapping[str, Any]) -> Application:
    if isinstance(value, Application):
        if arguments:
            raise InvalidRequestError(
                f"{what} is built already, so it takes no arguments (got {_listed([*arguments])}); "
                "only a function that returns an Application does"
            )
        return value
    if not inspect.isfunction(value):
        raise InvalidRequestError(f"{what}: {not_an_application(value)}")
    built = _call_builder(value, what, arguments)
    if not isinstance(built, Application):
        raise InvalidRequestError(f"what {what}() returned: {not_an_application(built)}")
    return built


def _call_builder(builder: Any, what: str, arguments: Mapping[str, Any]) -> Any:
    parameters = _parameters(builder)
    if len(parameters) > 1 or (arguments and not parameters):
        raise InvalidRequestError(
            f"{what}: a builder function takes one parameter, a dict of the key=value arguments; "
            f"this one takes {len(parameters)}"
        )
    given: list[Any] = [dict(arguments)] if parameters else []
    if parameters and _is_model(parameters[0].annotation):
        given = [validated(parameters[0].annotation, arguments)]
    try:
        return builder(*given)
    except GreenroomError:
        raise
    except Exception as error:  # the user's function may do anything
        text = f"calling {what} failed: {type(error).__name__}: {error}"
        raise ImportFailedError(text, users_traceback(error)) from error


def _parameters(builder: Any) -> list[inspect.Parameter]:
    try:
        signature = inspect.signature(builder, eval_str=True)
    except NameError:  # an annotation that exists for type checkers only
        signature = inspect.signature(builder)
    return list(signature.parameters.values())


def _is_model(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)
