"""Deploy all that a document names: import it, build it, ask the controller for it in one change.

Theory of operation. The user's modules are imported in this process. For a server, which must not
run user code, that is one that ends afterwards (http_front/admin/applying.py). What is built is
plain values. The controller makes them so in one operation: all of the document or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from greenroom.core import operations as ops
from greenroom.core.config import LoggingConfig, RuntimeEnv
from greenroom.core.errors import GreenroomError, InvalidRequestError
from greenroom.core.validation import Place, unknown_name
from greenroom.serve.build import Built, build
from greenroom.serve.code.importing import (
    DEFAULT_ATTRIBUTE,
    forget_modules,
    load_application,
    read_arguments,
)
from greenroom.serve.schema import (
    DeploymentSchema,
    InvalidDocumentError,
    ServeApplicationSchema,
    ServeDeploySchema,
)

_CODE = {"code", "code_hash"}
_NOT_WRITTEN: Any = {"autoscaling_config": {"policy": _CODE}, "request_router_config": _CODE}


def build_document(
    document: ServeDeploySchema, base: Path, app_dir: Path | None, otherwise: Path = Path()
) -> Built:
    """Import and build a document's applications; InvalidDocumentError names all that failed.

    Modules are looked for in ``app_dir``, or in an application's ``working_dir``, or ``otherwise``.
    Paths of a ``runtime_env`` are relative to ``base``.
    """
    found: list[Built] = []
    problems: list[tuple[Place, str]] = []
    cause: BaseException | None = None
    last_dir: Path | None = None
    for number, schema in enumerate(document.applications):
        env = None if schema.runtime_env is None else _from(base, schema.runtime_env)
        import_dir = app_dir or otherwise
        if app_dir is None and env is not None and Path(env.working_dir or "-").is_dir():
            import_dir = Path(str(env.working_dir))
        if last_dir is not None and import_dir != last_dir:
            forget_modules(last_dir)  # modules of two folders may have one name
        last_dir = import_dir
        try:
            log = schema.logging_config or document.logging_config
            found.append(_build(schema, ("applications", number), import_dir, env, log, base))
        except InvalidDocumentError as error:
            problems += error.problems
            cause = cause or error.__cause__
    if problems:
        raise InvalidDocumentError(problems) from cause
    return Built.of_all(found)


def _build(
    schema: ServeApplicationSchema,
    place: Place,
    import_dir: Path,
    runtime_env: RuntimeEnv | None,
    logging_config: LoggingConfig | None,
    base: Path,
) -> Built:
    options = {each.name: _options(each, base) for each in schema.deployments}
    try:
        application = load_application(schema.import_path, import_dir, schema.args)
        built = build(
            application,
            schema.name,
            schema.route_prefix,
            runtime_env=runtime_env,
            options=options,
            logging_config=logging_config,
        )
    except GreenroomError as error:
        raise InvalidDocumentError([((*place, "import_path"), str(error))]) from error
    known = [spec.name for spec in built.deployments]
    what = f"deployment of {schema.import_path}"
    unknown = [
        ((*place, "deployments", number, "name"), str(unknown_name(what, each.name, known)))
        for number, each in enumerate(schema.deployments)
        if each.name not in known
    ]
    if unknown:
        raise InvalidDocumentError(unknown)
    return built


def _options(schema: DeploymentSchema, base: Path) -> dict[str, Any]:
    given = schema.given
    for name in ("actor_options", "ray_actor_options"):
        if (options := given.get(name)) is not None and "runtime_env" in options.model_fields_set:
            env = _from(base, options.runtime_env)
            given[name] = options.model_copy(update={"runtime_env": env})
    return given


def _from(base: Path, env: RuntimeEnv) -> RuntimeEnv:
    """Return a runtime_env with paths relative to where we are, rather than to ``base``."""
    paths: dict[str, Any] = {"py_modules": tuple(str(base / path) for path in env.py_modules)}
    for name in ("working_dir", "pip", "uv"):
        if isinstance(path := getattr(env, name), str):  # of the latter, no list of requirements
            paths[name] = str(base / path)
    return env.model_copy(
        update={name: paths[name] for name in paths.keys() & env.model_fields_set}
    )


# --- From code to a document ----------------------------------------------------------------------


class Target(NamedTuple):
    """An application to describe: its import path, and the arguments of its builder."""

    import_path: str
    arguments: Mapping[str, str]


def read_targets(arguments: Sequence[str]) -> list[Target]:
    """Read import paths, each with the ``key=value`` arguments that follow it."""
    targets: list[tuple[str, list[str]]] = []
    for each in arguments:
        if "=" not in each:
            targets.append((each, []))
        elif targets:
            targets[-1][1].append(each)
        else:
            raise InvalidRequestError(f"{each!r}: expected MODULE:ATTRIBUTE before its arguments")
    return [Target(path, read_arguments(pairs)) for path, pairs in targets]


def described(targets: Sequence[Target], app_dir: Path) -> dict[str, Any]:
    """Return a document of applications, with the options that are not the default.

    One is served at "/" and called "default". Several are called by their modules.
    """
    described: list[dict[str, Any]] = []
    for target in targets:
        application = load_application(target.import_path, app_dir, target.arguments)
        path, colon, attribute = target.import_path.partition(":")
        module = path.rpartition(".")[2]
        taken = [each["name"] for each in described]
        name = module if module not in taken else f"{module}-{len(taken) + 1}"
        name, route = (name, f"/{name}") if len(targets) > 1 else ("default", "/")
        built = build(application, name, route)
        parts = [_described_deployment(spec) for spec in built.deployments]
        arguments = {"args": dict(target.arguments)} if target.arguments else {}
        described.append(
            {
                "name": name,
                "route_prefix": route,
                "import_path": f"{path}:{attribute if colon else DEFAULT_ATTRIBUTE}",
                **arguments,
                "deployments": parts,
            }
        )
    return {"applications": described}


def _described_deployment(spec: ops.DeploymentSpec) -> dict[str, Any]:
    config = spec.config.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_WRITTEN)
    if "autoscaling_config" in config:
        config.pop("num_replicas", None)
    options = spec.actor_options.model_dump(mode="json", exclude_defaults=True)
    return {
        "name": spec.name,
        **({} if spec.version is None else {"version": spec.version}),
        **config,
        **({"ray_actor_options": options} if options else {}),
    }
