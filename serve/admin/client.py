"""The admin client: backends, endpoints and traffic, one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from greenroom.actors.caller.connection import Connection
from greenroom.actors.runtime.settings import HostSettings, read_settings
from greenroom.core import operations as ops
from greenroom.core.comparing.comparing import Compare, Response, check_compare
from greenroom.core.config import ActorOptions, BackendConfig
from greenroom.core.errors import InvalidRequestError
from greenroom.serve.admin import reports
from greenroom.serve.admin.checks import (
    check_answers_http,
    check_arguments,
    check_list,
    check_mapping,
    check_name,
    check_path,
    check_timeout,
    settings_of,
)
from greenroom.serve.admin.session import destroy, raising_users_own, wait_for_goal
from greenroom.serve.code.packing import pack_by_value, pack_code, packed, packed_changes
from greenroom.serve.code.runtime_env import pack_env
from greenroom.serve.handle import DeploymentHandle
from greenroom.serve.schema import ServeStatus

BY_NAME = "/<name>"  # no route; stands for the deployment's name
CompareFunction = Callable[[Response, Response], Any]


def packed_compare(what: str, compare: object) -> Compare:
    """Return settings as they travel, a function as bytes; InvalidRequestError otherwise."""
    if isinstance(compare, Compare) or not callable(compare) or not hasattr(compare, "__name__"):
        return check_compare(compare)
    code = pack_by_value(f"the compare function of {what}", compare)
    name = f"{compare.__module__}.{getattr(compare, '__qualname__', compare.__name__)}"
    return check_compare({"how": "function", "function": name, "code": code})


class Client:
    """Asks a running system's controller for changes; made by :meth:`connect`.

    Every change is idempotent: the same call again changes nothing. Those that take time return the
    id of a goal for :meth:`wait_for_goal`, or None when nothing changed. A bad value is an
    InvalidRequestError, a contradiction of what exists a ConflictError (both are ValueErrors), a
    name that nothing bears an UnknownNameError (a KeyError).
    """

    def __init__(self, connection: Connection, settings: HostSettings) -> None:
        self._connection = connection
        self._settings = settings

    @classmethod
    def connect(
        cls, address: str | None = None, *, key_file: str | os.PathLike[str] | None = None
    ) -> Self:
        """Connect to the system at ``HOST:PORT``, or to this host's; NotRunningError if none.

        Any host of a cluster will do, and several may be given with commas, of which one must be
        there. The client learns of all others, and goes on with them when that one is gone. A
        system of another host wants the cluster file: ``key_file``, or what GREENROOM_KEY_FILE
        names.
        """
        key = None if key_file is None else check_path("key_file", key_file)
        settings = read_settings(address=address, key_file=key)
        return cls(Connection.open(settings), settings)

    def close(self) -> None:
        """Close the connection; what was changed stays."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, operation: str, **fields: Any) -> Any:
        """Ask for an operation of the admin API by its name, and return its answer.

        For those without a method, such as ``ask("evict_host", host="b")``; docs/api.md has all.
        """
        return self._connection.request(ops.named(operation).of(**fields))

    def create_backend(
        self,
        tag: str,
        func_or_class: Callable[..., Any],
        *init_args: Any,
        config: BackendConfig | Mapping[str, Any] | None = None,
        actor_options: ActorOptions | Mapping[str, Any] | None = None,
        version: str | None = None,
    ) -> str | None:
        """Run code under a tag; returns the goal's id."""
        what = f"backend {tag!r}"
        code, folders = self._packed(what, func_or_class, init_args, {}, version, actor_options)
        made = packed(what, settings_of(BackendConfig, config))
        return self._goal(ops.CreateBackend.of(tag=tag, config=made, folders=folders, **code))

    def update_backend_config(
        self, tag: str, config: BackendConfig | Mapping[str, Any]
    ) -> str | None:
        """Change the given settings of a backend and no others; returns the goal's id."""
        if not isinstance(config, BackendConfig):
            check_mapping("config", config)
            config = BackendConfig.renamed(config)
        changes = packed_changes(f"backend {tag!r}", config)
        return self._goal(ops.UpdateBackendConfig(tag=tag, changes=changes))

    def get_backend_config(self, tag: str) -> BackendConfig:
        """Return a backend's settings."""
        return BackendConfig.read(self._connection.request(ops.GetBackendConfig(tag=tag)))

    def list_backends(self) -> dict[str, Any]:
        """Return all backends by tag, with settings and state."""
        return dict(self._connection.request(ops.ListBackends()))

    def delete_backend(self, tag: str, force: bool = False) -> str | None:
        """Stop a backend, at once with ``force``; refused while an endpoint names it."""
        return self._goal(ops.DeleteBackend(tag=tag, force=force))

    def get_series(
        self, endpoint: str | None = None, span: str = "live", last: int | None = None
    ) -> dict[str, Any]:
        """Return the traffic over time, of the cluster and of each endpoint at each backend.

        ``span`` is "live", steps of a second for two minutes, or "hour", steps of ten seconds.
        ``last`` gives only so many of the newest steps. The controller has it in memory only, so it
        begins anew with each controller; None stands for what that one has not seen.
        """
        asked = ops.GetSeries.of(endpoint=endpoint, span=span, last=last)
        return dict(self._connection.request(asked))

    def create_endpoint(
        self,
        name: str,
        *,
        backend: str,
        route: str | None = None,
        methods: Sequence[str] = ("GET",),
        retryable: bool | None = None,
    ) -> None:
        """Name a backend; without a route it can be called through handles only.

        ``retryable``: whether a query may be run again when its replica died under it; None leaves
        it to the backend's own setting, and where there is none to the HTTP method.
        """
        self._connection.request(
            ops.CreateEndpoint.of(
                name=name, backend=backend, route=route, methods=methods, retryable=retryable
            )
        )

    def delete_endpoint(self, name: str) -> None:
        """Forget an endpoint; returns when nothing routes to it any more."""
        self._connection.request(ops.DeleteEndpoint(name=name))

    def list_endpoints(self) -> dict[str, dict[str, Any]]:
        """Return all endpoints by name: route, methods, traffic and shadows."""
        return dict(self._connection.request(ops.ListEndpoints()))

    def set_traffic(self, endpoint: str, weights: Mapping[str, float]) -> None:
        """Give an endpoint's traffic to backends by weight; returns when every proxy knows it.

        Each weight is from 0 to 1, and they sum to 1. Queries with a shard key stay where they are,
        as far as the weights allow; the others are drawn.
        """
        self._connection.request(ops.SetTraffic.of(endpoint=endpoint, weights=weights))

    def shadow_traffic(
        self,
        endpoint: str,
        backend: str,
        proportion: float,
        compare: str | Mapping[str, Any] | Compare | CompareFunction | None = None,
    ) -> None:
        """Copy a proportion of an endpoint's queries to a backend, until it is set to 0.

        Returns when every proxy knows it. The copies' results are discarded, and copies that the
        backend cannot follow with are dropped: no request waits for a shadow, or fails with it.

        With ``compare`` the shadow's answers are compared with those that clients get, and
        :meth:`diff` tells what is different: "status", "json", a dict with ``how`` and
        ``relative_tolerance``, ``absolute_tolerance`` and ``ignore`` (JSON pointers), or a function
        of both answers, each with ``status``, ``headers``, ``body``, ``value`` and ``json()``. It
        returns None or True for no difference, else a text that names it, or False.
        """
        what = f"shadow {backend!r} of endpoint {endpoint!r}"
        self._connection.request(
            ops.ShadowTraffic.of(
                endpoint=endpoint,
                backend=backend,
                proportion=proportion,
                compare=None if compare is None else packed_compare(what, compare),
            )
        )

    def diff(self, endpoint: str) -> dict[str, dict[str, Any]]:
        """Return by shadow what comparing its answers has found: counts, causes and examples."""
        return dict(self._connection.request(ops.GetDifferences(endpoint=endpoint)))

    def rollout(
        self,
        endpoint: str,
        *,
        to: str,
        steps: Sequence[float] = ops.DEFAULT_STEPS,
        hold_s: float = ops.DEFAULT_HOLD_S,
        abort_if: Mapping[str, float] | None = None,
        alpha: float = ops.DEFAULT_ALPHA,
        min_samples: int = ops.DEFAULT_MIN_SAMPLES,
        ready_timeout_s: float = ops.DEFAULT_READY_TIMEOUT_S,
    ) -> str | None:
        """Move an endpoint's traffic to a backend step by step; returns the goal's id.

        Each of ``steps`` is the new backend's share, and stands for ``hold_s`` seconds at least and
        until ``min_samples`` queries of either side have ended; the last is 1. ``abort_if`` limits
        error_rate, error_rate_increase, p95_latency_s, p95_latency_ratio or difference_rate (of
        answers that :meth:`shadow_traffic` compares): once the evidence against one is beyond
        1/``alpha``, all traffic goes back, and the goal fails with the reason. It goes back, too,
        when no replica runs for ``ready_timeout_s``. The chance that a backend which keeps all
        limits is sent back for its evidence is at most ``alpha``. The page
        docs/rollouts.md has the method.
        """
        return self._goal(
            ops.StartRollout.of(
                endpoint=endpoint,
                to=to,
                steps=steps,
                hold_s=hold_s,
                abort_if=abort_if,
                alpha=alpha,
                min_samples=min_samples,
                ready_timeout_s=ready_timeout_s,
            )
        )

    def abort_rollout(self, endpoint: str) -> None:
        """Go back to the traffic before the rollout; returns when every proxy knows it."""
        self._connection.request(ops.AbortRollout(endpoint=endpoint))

    def promote_rollout(self, endpoint: str) -> None:
        """Give the new backend all traffic now; returns when every proxy knows it."""
        self._connection.request(ops.PromoteRollout(endpoint=endpoint))

    def list_rollouts(self) -> dict[str, dict[str, Any]]:
        """Return where the last rollout of each endpoint stands, and why."""
        return dict(self._connection.request(ops.ListRollouts()))

    def deploy(
        self,
        name: str,
        func_or_class: Callable[..., Any],
        *,
        init_args: Sequence[Any] = (),
        init_kwargs: Mapping[str, Any] | None = None,
        version: str | None = None,
        prev_version: str | None = None,
        route_prefix: str | None = BY_NAME,
        config: BackendConfig | Mapping[str, Any] | None = None,
        actor_options: ActorOptions | Mapping[str, Any] | None = None,
    ) -> str | None:
        """Run a backend and an endpoint of the same name; returns the goal's id.

        Other code, arguments, options or another ``version`` than what runs is a rolling update:
        new replicas start before old ones stop, and when they cannot start, the old version stays
        and the goal fails. Other settings alone are changed in place. ``prev_version`` makes it a
        compare-and-set: unless just that version is deployed, ConflictError, and nothing changes.
        ``route_prefix`` is ``/<name>`` if not given; None gives it no route.
        """
        check_list("init_args", init_args)
        if init_kwargs is not None:
            check_mapping("init_kwargs", init_kwargs)
        what = f"deployment {name!r}"
        made = settings_of(BackendConfig, config)
        arguments = tuple(init_args), dict(init_kwargs or {})
        code, folders = self._packed(what, func_or_class, *arguments, version, actor_options)
        route = f"/{name}" if route_prefix is BY_NAME else route_prefix
        if route is not None:
            check_answers_http(what, func_or_class, made.http_call_methods)
        spec = {"name": name, "config": packed(what, made), **code}
        return self._goal(
            ops.Deploy.of(spec=spec, route_prefix=route, prev_version=prev_version, folders=folders)
        )

    def delete_deployment(self, name: str) -> str | None:
        """Delete a deployment and its endpoint; returns the goal's id, None if there was none."""
        return self._goal(ops.DeleteDeployment(name=name))

    def get_deployment_info(self, name: str) -> dict[str, Any]:
        """Return a deployment's version, route, settings and state; UnknownNameError if none."""
        return dict(self._connection.request(ops.GetDeployment(name=name)))

    def list_deployments(self) -> dict[str, dict[str, Any]]:
        """Return by name what :meth:`get_deployment_info` tells of each."""
        return dict(self._connection.request(ops.ListDeployments()))

    def history(self) -> list[dict[str, Any]]:
        """Return the changes that are kept, oldest first: id, at, user, address, what, changes."""
        return list(self._connection.request(ops.ListHistory()))

    def undo(self, change_id: int | None = None) -> dict[str, Any]:
        """Restore what was before a change, by default the last one, as a new change.

        Returns what was undone, with the goal's id as ``goal``. Raises ConflictError saying why
        where that cannot be, and UnknownNameError for a change that is not kept.
        """
        return dict(self._connection.request(ops.UndoChange(change_id=change_id)))

    def get_handle(self, endpoint: str, missing_ok: bool = False) -> DeploymentHandle:
        """Return a handle of an endpoint; UnknownNameError if it is missing, unless that is ok."""
        check_name("endpoint", endpoint)
        if not missing_ok:
            reports.check_there(self._connection, [(None, endpoint)])
        return DeploymentHandle(endpoint, None, client=self._connection.queries)

    def wait_for_goal(self, goal_id: str | None, timeout_s: float | None = None) -> None:
        """Wait until a change is done; returns at once for None, the goal of no change.

        Raises TimeoutError, or what made the change fail: the constructor's exception, say.
        """
        check_timeout("timeout_s", timeout_s)
        with raising_users_own():
            wait_for_goal(self._connection, goal_id, timeout_s)

    def drain_host(self, host: str, force: bool = False, timeout_s: float | None = None) -> None:
        """Replace elsewhere what is on a host, which takes no replicas until it is undrained.

        Returns when nothing is left there; TimeoutError before that leaves it draining. The last
        host that takes replicas is a ConflictError, unless with ``force``, which does not wait.
        """
        check_timeout("timeout_s", timeout_s)
        self._connection.request(ops.DrainHost(host=host, force=force), timeout_s=timeout_s)

    def undrain_host(self, host: str) -> None:
        """Let a host that was drained take replicas again; those that have moved stay."""
        self._connection.request(ops.UndrainHost(host=host))

    def status(self) -> ServeStatus:
        """Return the state of all applications."""
        return ServeStatus.of(reports.read_report(self._connection))

    def shutdown(self) -> list[str]:
        """Delete everything, stop the system, and delete its state.

        Returns the ids of the deletions' goals, which have been reached: every replica has finished
        what it had, or was ended after its time limit. A controller that does not answer is not
        waited for: the processes are killed then.
        """
        return destroy(self._settings, lambda: self._connection).goals

    def _packed(
        self,
        what: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        version: str | None,
        actor_options: ActorOptions | Mapping[str, Any] | None,
    ) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        """Return the fields of an operation that are of code, and the zips to send."""
        if not callable(target) or not hasattr(target, "__name__"):
            raise InvalidRequestError(f"{what}: {target!r} is no function or class")
        check_arguments(what, target, args, kwargs)
        options = settings_of(ActorOptions, actor_options)
        env = pack_env(options.runtime_env)
        code = pack_code(what, target, args, kwargs, version, env.names)
        fields = {
            "code": code.pickled,
            "code_hash": code.hash,
            "version": version,
            "actor_options": options.model_copy(update={"runtime_env": env.env}).model_dump(),
        }
        return fields, reports.missing_of(self._connection, env.folders)

    def _goal(self, request: Any) -> str | None:
        goal: str | None = self._connection.request(request)
        return goal
