"""A plugin for mypy, which does not read what class decorators return.

    [tool.mypy]
    plugins = ["greenroom.serve.mypy_plugin"]

With it, a class under ``@serve.deployment`` has the ``bind``, ``options`` and the rest that it has
when it runs. Other type checkers see that by themselves.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_STAR, ARG_STAR2
from mypy.plugin import ClassDefContext, Plugin
from mypy.plugins.common import add_attribute_to_class
from mypy.types import AnyType, CallableType, Type, TypeOfAny

_MODULE = "greenroom.serve.deployments"


class DeploymentPlugin(Plugin):
    """Gives the classes that are deployed what a Deployment has."""

    def get_class_decorator_hook_2(self, fullname: str) -> Callable[[ClassDefContext], bool] | None:
        """Return what is done with a class below a decorator of that name."""
        return _deploy if fullname == f"{_MODULE}.deployment" else None


def _deploy(context: ClassDefContext) -> bool:
    anything = AnyType(TypeOfAny.explicit)
    application = context.api.named_type_or_none(f"{_MODULE}.Application", [anything])
    deployment = context.api.named_type_or_none(f"{_MODULE}.Deployment", [anything])
    if application is None or deployment is None:
        return False  # not analyzed yet: ask again
    function = context.api.named_type("builtins.function")

    def returning(result: Type) -> CallableType:
        types, names = [anything, anything], [None, None]
        return CallableType(types, [ARG_STAR, ARG_STAR2], names, result, function)

    members: dict[str, Type] = {
        "bind": returning(application),
        "options": returning(deployment),
        "func_or_class": anything,
        "name": context.api.named_type("builtins.str"),
    }
    for name, kind in members.items():
        if name not in context.cls.info.names:  # a class's own attribute is what it uses itself
            add_attribute_to_class(context.api, context.cls, name, kind, is_classvar=True)
    return True


def plugin(_version: str) -> type[DeploymentPlugin]:
    """Return the plugin; mypy calls this."""
    return DeploymentPlugin
