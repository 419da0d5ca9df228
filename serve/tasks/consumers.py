"""``serve.task_consumer`` and ``serve.task_handler``: methods that run as jobs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from greenroom.actors.replica.jsonable import to_json
from greenroom.core.jobs import TaskProcessorConfig
from greenroom.core.lifecycle.placement import STORE_LABEL
from greenroom.serve.decorators.per_instance import check_class

T = TypeVar("T", bound=type)
TASKS = "_greenroom_tasks"  # of a consumer's class: a Consumer
_NAME = "_greenroom_task"  # of a handler: its task's name
RUN = "run_task_"  # before a task's name: the method that takes a call and returns a result as JSON
# One replica at a time has the store, which not every host has.
QUEUE_OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": 1_000,
    "retryable": True,
    "actor_options": {"label_selector": {STORE_LABEL: "yes"}},
}


@dataclass(frozen=True, slots=True)
class Consumer:
    """What a queue knows of its consumer; ``tasks`` is name -> what the handler may be given."""

    config: TaskProcessorConfig
    tasks: dict[str, inspect.Signature]


def task_handler(method: Any = None, /, *, name: str | None = None) -> Any:
    """Make a method of a task consumer a task, called by its ``name`` (the method's own).

    Its arguments and its result are JSON. It may run more than once for one job, after a failure.
    """

    def decorate(function: Any) -> Any:
        if not inspect.isfunction(function):
            raise TypeError(f"@serve.task_handler is for methods, not for {function!r}")
        chosen = function.__name__ if name is None else name
        if not chosen.isidentifier():
            raise ValueError(f"name={chosen!r}: must be a Python name, such as 'resize'")
        setattr(function, _NAME, chosen)
        return function

    return decorate if method is None else decorate(method)


def task_consumer(
    cls: Any = None, /, *, task_processor_config: TaskProcessorConfig | None = None
) -> Any:
    """Have a queue stand before a class's deployment, whose task handlers run as jobs.

    Below ``@serve.deployment``. What ``bind`` returns is the queue: its HTTP requests and handles
    enqueue jobs and tell what became of them. See docs/jobs.md.
    """
    config = TaskProcessorConfig() if task_processor_config is None else task_processor_config
    if not isinstance(config, TaskProcessorConfig):
        raise TypeError(f"task_processor_config={config!r}: must be a serve.TaskProcessorConfig")

    def decorate(target: T) -> T:
        check_class("serve.task_consumer", target)
        tasks = {}
        for attribute, method in inspect.getmembers(target, inspect.isfunction):
            name = getattr(method, _NAME, None)
            if name is None:
                continue
            if name in tasks:
                raise ValueError(f"{target.__name__} has two task handlers named {name!r}")
            tasks[name] = _signature(method)
            run = run_async_handler if inspect.iscoroutinefunction(method) else run_handler
            setattr(target, RUN + name, partialmethod(run, attribute))
        if not tasks:
            raise TypeError(
                f"{target.__name__} has no task: decorate methods with @serve.task_handler"
            )
        setattr(target, TASKS, Consumer(config, tasks))
        return target

    return decorate if cls is None else decorate(cls)


def _signature(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature without self, and without what may be classes of the user's."""
    try:
        signature = inspect.signature(method, eval_str=True)
    except Exception:  # an annotation for type checkers only may raise anything
        signature = inspect.signature(method)
    empty = inspect.Parameter.empty
    bare = [
        each.replace(
            annotation=_checked(each) if _is_json(each.annotation) else empty,
            default=each.default if each.default is empty else None,
        )
        for each in list(signature.parameters.values())[1:]
    ]
    return inspect.Signature(bare)


def _checked(parameter: inspect.Parameter) -> Any:
    """Return a parameter's type, with None where that is its default: ``limit: int = None``."""
    kind = parameter.annotation
    return kind | None if parameter.default is None else kind


def _is_json(kind: Any) -> bool:
    """Return whether values of a type are all that JSON has of it."""
    parts = get_args(kind)
    if get_origin(kind) is dict and parts and parts[0] is not str:
        return False
    if get_origin(kind) in (list, dict, Union, UnionType):
        return all(map(_is_json, parts))
    return kind in (str, int, float, bool, list, dict, NoneType, Any)


def types_of(signature: inspect.Signature) -> TypeAdapter[Any]:
    """Return what checks the arguments of a call, by name, where a handler says their types."""
    single = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    kinds = {
        name: each.annotation
        for name, each in signature.parameters.items()
        if each.kind in single and each.annotation is not inspect.Parameter.empty
    }
    return TypeAdapter(TypedDict("Arguments", kinds, total=False))  # type: ignore[operator]  # made here


def run_handler(consumer: Any, attribute: str, call: bytes) -> bytes:
    """Run a handler for a queue, which has none of the classes in its result; code names this."""
    args, kwargs = json.loads(call)
    return to_json(getattr(consumer, attribute)(*args, **kwargs))


async def run_async_handler(consumer: Any, attribute: str, call: bytes) -> bytes:
    """Do what run_handler does, for one made by ``async def``."""
    args, kwargs = json.loads(call)
    return to_json(await getattr(consumer, attribute)(*args, **kwargs))
