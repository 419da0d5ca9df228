"""``serve.ingress``: an ASGI app, such as FastAPI's, that answers a deployment's HTTP requests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from greenroom.actors.replica.asgi import AppSource, is_app
from greenroom.actors.replica.fastapi_routes import give_self
from greenroom.actors.replica.servable import ASGI_APP
from greenroom.serve.decorators.per_instance import check_class

T = TypeVar("T")


class AsgiDeployment:
    """What runs an app that comes without a class of its own.

    Its arguments are for other deployments' sake: what is bound is deployed, too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def ingress(app: Callable[..., Any]) -> Callable[..., Any]:
    """Have an ASGI app answer the HTTP requests of a class.

    ``app`` is an app (FastAPI, Starlette, or any other callable of scope, receive and send), or a
    function without arguments that returns one and is called in each replica. Below
    ``@serve.deployment``:

        @serve.deployment
        @serve.ingress(app)
        class Model:
            @app.get("/predict")
            def predict(self, x: int): ...

    FastAPI's routes may be methods: their ``self`` is the replica's instance. Several classes may
    share an app; each serves its own methods, and the app's functions. Without a class,
    ``serve.deployment(serve.ingress(app)())`` runs the app alone; deployments that it finds by
    ``serve.get_deployment_handle`` may be arguments of its ``bind``. Handles call the class's
    methods as ever. The route prefix is the scope's ``root_path``; the app's lifespan is run.
    TypeError for what is neither an app nor a factory, and for what is decorated and is no class.
    """
    source = AppSource(app) if callable(app) else None
    if source is None or not (source.is_factory or is_app(app)):
        raise TypeError(
            f"serve.ingress takes an ASGI app, or a function without arguments that returns one; "
            f"not {app!r}"
        )

    def decorate(cls: type[T] = AsgiDeployment) -> type[T]:  # type: ignore[assignment]
        check_class("serve.ingress", cls)
        if cls is AsgiDeployment:
            # Of the caller's module, as a named tuple is: its folder travels with the app.
            caller = sys._getframe(1).f_globals.get("__name__", cls.__module__)
            cls = type(cls.__name__, (cls,), {"__module__": caller})
        give_self(app, cls)
        setattr(cls, ASGI_APP, source)
        return cls

    return decorate
