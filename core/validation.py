"""Settings that are validated when made, and one-line texts about what is wrong with them."""

from __future__ import annotations

import copy
import difflib
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeGuard, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from greenroom.core.errors import InvalidRequestError, UnknownNameError

M = TypeVar("M", bound=BaseModel)

SHOWN_NAMES = 50  # of those there are, in the error for another
_CLOSE = 0.75  # two letters of a short word the other way round; less alike is another word
_VOICE = {  # pydantic speaks of "Input", though the line names the field, and of Python's types
    r"^(Input|String|Dictionary) should ": "must ",
    r"^Keys should be strings$": "must be a string",
    r"^Input is not a valid path\b.*": "must be a path",
    r" dictionary or instance of \w+$": " dictionary",
    r"\bvalid tuple\b": "valid list",
}
_SHORT = reprlib.Repr()  # as repr() of what people write; of more, and of what is deeper, its head
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 20


if TYPE_CHECKING:
    Checked = BaseModel  # for what it takes
else:

    class _Checking(type(BaseModel)):
        # An __init__ would also be called for models inside of others, which lose their places
        # then, and keep pydantic from reading JSON in its own way.
        def __call__(cls, /, *args, **fields):
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                problems = "; ".join(problems_in(error))
                raise InvalidRequestError(f"{cls.described(fields)}: {problems}") from None

    class Checked(BaseModel, metaclass=_Checking):
        """Base of models whose InvalidRequestError names every bad value that they are made of."""

        @classmethod
        def described(cls, _fields):
            """Say what cannot be made."""
            return f"invalid {cls.__name__}"


class Settings(Checked):
    """Base of all settings: frozen, and unknown names are refused rather than ignored.

    ``aliases`` are other names of fields that users may bring along, and ``hints`` says of names
    without a field what to use instead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    aliases: ClassVar[Mapping[str, str]] = {}
    hints: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def renamed(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``values`` by the fields' names; InvalidRequestError for two of one."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            field = cls.aliases.get(name, name)
            if field in found or (field != name and field in values):
                raise InvalidRequestError(f"{name} and {field} are two names for one thing")
            found[field] = value
        return found

    @model_validator(mode="before")
    @classmethod
    def _take_aliases(cls, values: Any) -> Any:
        return cls.renamed(values) if cls.aliases and isinstance(values, Mapping) else values

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Make them of values that another release wrote, without those that only it knows."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            unknown = [e["loc"] for e in error.errors() if e["type"] == "extra_forbidden"]
            if not unknown:
                raise
        known = copy.deepcopy(dict(values))
        for path in unknown:
            _drop(known, path)
        return cls.model_validate(known)


class UserCode(Settings):
    """Settings that name code of the user's, which travels pickled in them.

    ``code_hash`` is what makes two of them equal: the pickles of one function may differ.
    """

    code: bytes = Field(default=b"", repr=False)
    code_hash: str = ""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self.code_hash)

    def _identity(self) -> dict[str, Any]:
        fields = dict(self)
        if self.code_hash:
            del fields["code"]
        return fields


def jsonable(value: Any) -> Any:
    """Return a value, for validators; ValueError where it is not JSON-able.

    NaN is no JSON, and never equal to what it was.
    """
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON-able: {error}") from error
    return value


def _in_any_case(value: Any, choose: ValidatorFunctionWrapHandler) -> Any:
    value = getattr(value, "value", value)
    for spelled in (value.upper(), value.lower()) if isinstance(value, str) else ():
        with suppress(ValidationError):
            return choose(spelled)
    return choose(value)


IN_ANY_CASE = WrapValidator(_in_any_case)
"""Lets one of several texts be given in any case, and as a member of an enum."""


def names_code(value: Any) -> bool:
    """Return whether it may be the import path of a function or class, or is one."""
    return callable(value) or (isinstance(value, str) and "." in value.replace(":", "."))


def _drop(values: Any, path: Iterable[Any]) -> None:
    """Delete what ``path`` leads to; parts of it that name a type lead nowhere."""
    *outer, last = path
    for part in outer:
        values = values[part] if isinstance(values, list) or part in values else values
    del values[last]


def validated(model: type[M], values: Mapping[str, Any]) -> M:
    """Make ``model`` from ``values``; raise one InvalidRequestError that names every bad field."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise InvalidRequestError(describe(model.__name__, error)) from None


def describe(what: str, error: ValidationError) -> str:
    """Put every problem of a ValidationError into one line: field, value, expectation."""
    return f"invalid {what}: " + "; ".join(problems_in(error))


Place = tuple[str | int, ...]
"""Where in a document, or in settings: ("applications", 0, "name")."""


def problems_in(error: ValidationError) -> list[str]:
    """Return each problem of a ValidationError: field, value, expectation.

    A problem with several fields at once names them itself.
    """
    model = _model_named(error.title)
    return [with_place(*problem_of(item, model)) for item in error.errors()]


def problem_of(item: Any, model: type[Settings], *, shows_all: bool = True) -> tuple[Place, str]:
    """Return where an item of ``ValidationError.errors()`` is, and what is wrong there.

    ``model`` is the one that was to be made. Unless it ``shows_all``, the text has no value that is
    seen at the place: a list, a dict, and what no setting has the name of.
    """
    place = tuple(part for part in item["loc"] if part != "[key]")  # which is of the part before
    text = expectation(item, model)
    is_seen = item["type"] == "extra_forbidden" or isinstance(item["input"], dict | list | tuple)
    if not place or item["type"] == "missing" or (is_seen and not shows_all):
        return place, text
    return place, f"={_SHORT.repr(item['input'])}: {text}"


def with_place(place: Place, text: str) -> str:
    """Return a text with its place before it: ``applications[0].name: must be ...``."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    separator = "" if text.startswith("=") or not path else ": "
    return f"{path.removeprefix('.')}{separator}{text}"


def expectation(item: Any, model: type[Settings]) -> str:
    """Return what an item of ``ValidationError.errors()`` says that the value must be.

    ``model`` is the one that was to be made. Of a name that is none of a setting, it says which
    other one may be meant.
    """
    if item["type"] == "missing":
        return "must be given"
    text = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] != "extra_forbidden":
        for pydantics, ours in _VOICE.items():
            text = re.sub(pydantics, ours, text)
        return text
    name, model = str(item["loc"][-1]), _model_at(model, item["loc"][:-1])
    if hint := model.hints.get(name):
        return f"no such setting; {hint}"
    if near := suggestion(name, model.model_fields):
        return f"no such setting{near}"
    there = ", ".join(model.model_fields)
    return f"no such setting; there are: {there}" if there else "no such setting"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return which of the names may be meant; "" for none."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=_CLOSE)), "")


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return a question for the end of an error: which of the names may be meant; "" for none."""
    near = nearest(name, names)
    return f"; did you mean {near}?" if near else ""


def unknown_name(what: str, name: str, names: Iterable[str]) -> UnknownNameError:
    """Return the error for a name of nothing: with those there are, and which may be meant."""
    there = sorted(names)
    shown = ", ".join(there[:SHOWN_NAMES]) or "none"
    more = f" and {len(there) - SHOWN_NAMES} more" if len(there) > SHOWN_NAMES else ""
    return UnknownNameError(
        f"no {what} is named {name!r}; there are: {shown}{more}{suggestion(name, there)}"
    )


def _model_named(title: str) -> type[Settings]:
    unseen: list[type[Settings]] = [Settings]
    while unseen:
        model = unseen.pop()
        if model.__name__ == title:
            return model
        unseen += model.__subclasses__()
    return Settings  # has no settings, so nothing is said of others


def _model_at(model: type[Settings], place: Iterable[Any]) -> type[Settings]:
    """Return the model that a place in another one is validated by."""
    for part in place:
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def explain_missing(self: object, name: str) -> Any:
    """Be the ``__getattr__`` of a class with ``hints`` about names that it does not have."""
    hint = getattr(type(self), "hints", {}).get(name)
    kind = type(self).__name__
    raise AttributeError(f"{kind} has no {name!r}" + (f"; {hint}" if hint else ""))


# --- Numbers --------------------------------------------------------------------------------------


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether it is a number, perhaps NaN or infinite; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- Names, which become keys of the store and parts of file names --------------------------------

MAX_NAME_BYTES = 75  # application#deployment#hash, with what a store puts before it, is one key
# Methods of a class that its replica calls, and nothing else.
HOOKS = frozenset({"reconfigure", "check_health", "warmup", "record_autoscaling_stats"})
MAX_TAG_BYTES = 150  # of a backend or an endpoint of its own, which stands alone


def wrong_with(name: object, most_bytes: int = MAX_NAME_BYTES) -> str | None:
    """Say what a name should have been, or None where it is well."""
    if not isinstance(name, str) or not name:
        return "expected a name of one character or more"
    if "#" in name:
        return "expected a name without '#'"
    if not name.isprintable():
        return "expected printable characters"
    size = len(name.encode())
    if size > most_bytes:
        return f"expected at most {most_bytes} bytes in UTF-8; it has {size}"
    return None
