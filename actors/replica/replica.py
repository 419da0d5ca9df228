"""The replica: one actor running one copy of the user's code.

The actor itself takes the controller's orders; queries go to its data plane (data_plane.py).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from greenroom.actors.cluster.epoch_fence import EpochFence
from greenroom.actors.environments.environment import Environment
from greenroom.actors.messages.control import (
    ComparisonsReported,
    FetchFolder,
    FolderFetched,
    ReplicaReported,
    StartReplica,
)
from greenroom.actors.messages.queries import Address
from greenroom.actors.replica import (
    context as user_context,
    logging as user_logging,
    metrics,
    responses,  # noqa: F401  # loads Starlette, which replicas share by their fork
)
from greenroom.actors.replica.comparisons import Comparisons
from greenroom.actors.replica.data_plane import Queries
from greenroom.actors.replica.health import Health
from greenroom.actors.replica.threads import yield_to_messages
from greenroom.actors.replica.user_code import Failure, UserCode
from greenroom.actors.replica.wear import Wear
from greenroom.actors.runtime import cgroups, tracing
from greenroom.actors.runtime.actor import LoopActor
from greenroom.actors.runtime.logs import redirect_output, replica_log
from greenroom.actors.runtime.loop import end_where_starved
from greenroom.actors.runtime.port import Port
from greenroom.actors.runtime.shared_metrics import SharedMetrics
from greenroom.core import devices
from greenroom.core.comparing.comparing import Place, Plain
from greenroom.core.config import RuntimeEnv
from greenroom.core.effects import CheckReplica, ReconfigureReplica, StopReplica
from greenroom.core.errors import DeployFailedError
from greenroom.core.lifecycle.replicas import bounded
from greenroom.core.records import served_as

logger = logging.getLogger(__name__)

LEAST_DRAIN_S = 0.02
# Containers more than there were. Python before 3.13 looks for garbage after 700, which 30 queries
# under way have: as none leaves any, that took a tenth of the time of a batched model, for nothing.
# More than 3.13's own default would let cycles of user code, which may hold tensors, live for long.
COLLECT_AFTER = 2_000
_REFUSED = object()  # is no user_config


class Replica(LoopActor):
    """One copy of a backend's code, in the state that its controller has ordered."""

    role = "replica"
    carries_bodies = True
    runs_user_code = True
    ends_unasked = True

    def started(self) -> None:
        """See :meth:`LoopActor.started`."""
        self._obedience = EpochFence(self.loop)
        self.controller: Address | None = None
        self.tag = ""  # known from the first order
        self.config: dict[str, Any] = {}
        self.config_id = 0  # the newest taken
        self._applied_id = 0  # the newest that logging and user code have taken too
        # What logging and user code were given last; _REFUSED where user code raised.
        self._given: dict[str, Any] = {"logging_config": None, "user_config": None}
        self._is_applying = False
        self.state = "idle"
        self._failure: Failure | None = None  # of loading, then of reconfigure on the newest config
        self.user_code: UserCode | None = None
        self.queries: Queries | None = None
        self._health: Health | None = None
        self._environment: Environment | None = None
        served = lambda: 0 if self.queries is None else self.queries.served  # noqa: E731
        self._wear = Wear(self.loop, served, self._worn)

    def may_beat(self) -> bool:
        """See :meth:`LoopActor.may_beat`; answers go over links of their own."""
        loops = [self.loop] if self.queries is None else [self.loop, self.queries.port.loop]
        return end_where_starved(*loops)

    # --- Lifecycle, by the controller's orders ------------------------------------------------

    def receiveMsg_StartReplica(self, message: StartReplica, sender: Address) -> None:
        """Load the code, once; a repeat, from this controller or a new one, gets a report."""
        if not self._is_for_me(message, sender):
            return
        if self.state == "idle":
            self._begin_loading(message)
        elif self.config and message.config_id > self.config_id:
            self._apply_config(message.config, message.config_id)
        self._report()
        if self.queries is not None:
            self.queries.report()

    def receiveMsg_ReconfigureReplica(self, message: ReconfigureReplica, sender: Address) -> None:
        """Take newer settings; user code hears of a changed user_config."""
        if not self._is_for_me(message, sender):
            return
        if message.config_id > self.config_id:
            self._apply_config(message.config, message.config_id)
        else:
            self._report()

    def receiveMsg_CheckReplica(self, message: CheckReplica, sender: Address) -> None:
        """Run the user's check_health and report."""
        if not self._is_for_me(message, sender):
            return
        _take_rank(message)
        if self._health is None or self.state != "running":
            self._report(check_id=message.check_id)
        else:
            self.loop.start(self._check(self._health, message.check_id))

    async def _check(self, health: Health, check_id: int) -> None:
        self._report(check_id=check_id, failure=await health.check(self.config))
        if self.config["autoscaling_config"] is not None and await health.record():
            self._report()

    def _worn(self, why: str, is_full: bool) -> None:
        """Ask to be replaced; end at once, with what runs, where neighbours need the memory."""
        if is_full:
            logger.critical("%s ends: %s", self.tag, why)
        else:
            logger.info("%s is to be replaced: %s", self.tag, why)
        self._report(then=self.exiting if is_full else None)

    def receiveMsg_StopReplica(self, message: StopReplica, sender: Address) -> None:
        """Finish what runs, within ``drain_s``, then end the process."""
        if not self._is_for_me(message, sender) or self.state == "draining":
            return
        self.state = "draining"
        if self.queries is not None:
            self.queries.is_draining, self.queries.accepting = True, False
            self.queries.close_sockets()  # what they bring has no end to wait for
        self._report(then=self._drain)
        self.loop.call_later(max(message.drain_s, LEAST_DRAIN_S), self._leave)

    def _is_for_me(
        self,
        message: StartReplica | ReconfigureReplica | CheckReplica | StopReplica,
        controller: Address,
    ) -> bool:
        """Take an order of the controller; ports are reused, so it may be for a dead replica."""
        if self.tag not in {"", message.replica}:
            logger.warning("%s ignored an order for %s", self.tag, message.replica)
            return False
        if not self._obedience.accepts(message.epoch, controller):
            return False
        self.tag, self.controller = message.replica, controller
        return True

    def exiting(self) -> None:
        """Thespian asks the process to end: the system shuts down."""
        super().exiting()
        self.machine.kill_descendants(self.process)  # what user code has started
        os._exit(0)  # user threads may never end, and Thespian would wait for them

    # --- User code's life ---------------------------------------------------------------------

    def _begin_loading(self, order: StartReplica) -> None:
        self.state = "starting"
        self.config, self.config_id = order.config, order.config_id

        def ask(digest: str) -> None:
            self.loop.send(self.controller, FetchFolder(replica=order.replica, digest=digest))

        env = RuntimeEnv.read(order.runtime_env)
        self._environment = Environment(self.settings, env, ask)
        # This host's processes are to know of this one.
        redirect_output(self.settings, replica_log(order.replica))
        self.records.add(
            self.process,
            "replica",
            f"replica {order.replica}",
            tag=order.replica,
            address=getattr(self.myAddress.addressDetails, "text", ""),
            folders=",".join(env.folders),
            environment=self._environment.name,
        )
        groups = cgroups.handed_on()
        group = None if groups is None else cgroups.enter(groups, order.replica, order.num_cpus)
        if group is not None:
            self._wear.has_group(group)
        user_context.install(
            user_context.ReplicaContext(
                app_name=served_as(order.application),
                deployment=order.deployment,
                replica_tag=order.replica,
                backend=order.backend,
                version=order.version,
            )
        )
        _take_rank(order)
        self.loop.start(self._load(order, self._environment))

    async def _load(self, order: StartReplica, environment: Environment) -> None:
        """Load the code where its packages and folders are, and have it pass a health check."""
        begun_at = time.monotonic()
        failure = self._configure_logging(order.config)
        try:
            if failure is None:
                failure = await self._load_code(order, environment)
        except DeployFailedError as error:
            failure = Failure.of(DeployFailedError(str(error)))  # where it arose is of no help
        if failure is not None:
            logger.error("%s could not start: %s", self.tag, failure.traceback)
        self._applied_id = max(self._applied_id, order.config_id)
        if self.state == "starting":
            self.state = "failed" if failure is not None else "running"
            self._failure = failure or self._failure  # of a reconfigure meanwhile
            metrics.started(time.monotonic() - begun_at)
            if failure is None:
                self._wear.begin()
            if self.queries is not None:
                self.queries.accepting = failure is None
        self._report()

    async def _load_code(self, order: StartReplica, environment: Environment) -> Failure | None:
        python = await environment.enter_packages()
        if python is not None:
            self._continue_in(python, order)
        user_code, health = self._prepare(order)
        _use_devices(order)
        tracing.start(
            order.backend,
            {
                "service.instance.id": order.replica,
                "service.version": order.version or "",
                "host.name": self.settings.host_name,
            },
        )
        await environment.enter_folders()
        if self.state != "starting":  # it was asked to stop meanwhile
            return None
        self._given["user_config"] = user_config = self.config["user_config"]
        failure = await asyncio.wrap_future(user_code.load(order.code, user_config))
        return failure or await health.first_check(self.config["health_check_timeout_s"])

    def _continue_in(self, python: str, order: StartReplica) -> None:
        """Go on in another interpreter: it gets the order once more, with the newest settings."""
        if self.state != "starting":
            raise DeployFailedError("it was told to stop meanwhile")
        newest = replace(order, config=self.config, config_id=self.config_id)
        try:
            self.continue_in(python, newest, self.controller)
        except OSError as error:
            raise DeployFailedError(f"{python}: {error}") from error

    def _prepare(self, order: StartReplica) -> tuple[UserCode, Health]:
        """Make what runs the code, in the interpreter that it is for."""
        yield_to_messages()
        gc.set_threshold(COLLECT_AFTER)
        # As Ray does. With a thread for each core, the BLAS threads of small batches wait for the
        # cores of other processes: a numpy model had a fourth of its speed.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(order.num_cpus))))
        self.user_code = user_code = UserCode()
        self._health = health = Health(user_code, order.replica)
        settings = self.settings
        port = Port(settings.admin_port, self.process, user_code.loop, machine=self.machine)
        limit = self.config["max_ongoing_requests"]
        comparisons = Comparisons(port, self._comparisons_found)
        tag, backend = order.replica, order.backend
        self.queries = queries = Queries(port, user_code, tag, backend, limit, comparisons)
        self._configure()
        models = user_context.model_ids
        shown = SharedMetrics(lambda: metrics.collect(queries.running, len(models())))
        shown.keep_showing(self.loop.call_later)
        user_code.start()
        return user_code, health

    def receiveMsg_FolderFetched(self, message: FolderFetched, _sender: Address) -> None:
        """See :meth:`Environment.fetched`."""
        if self._environment is not None:
            self._environment.fetched(message)

    def _configure(self) -> None:
        """Give all parts the newest settings."""
        for part in (self.user_code, self.queries, self._wear):
            if part is not None:
                part.configure(self.config)

    def _configure_logging(self, config: dict[str, Any]) -> Failure | None:
        wanted: Any = config.get("logging_config")
        try:
            user_logging.configure(wanted, self.tag)
        except OSError as error:
            text = f"logs_dir={wanted['logs_dir']!r} of logging_config cannot be used: {error}"
            return Failure.of(DeployFailedError(text))
        self._given["logging_config"] = wanted
        return None

    def _comparisons_found(self, found: dict[Place, Plain]) -> None:
        """Report to the controller what comparing answers found; called on user code's loop."""
        report = ComparisonsReported(process=self.process, found=found)
        self.loop.post(lambda: self.loop.send(self.controller, report))

    def _apply_config(self, config: dict[str, Any], config_id: int) -> None:
        """Take newer settings; they count as applied when user code has taken its part of them."""
        self.config, self.config_id = config, config_id
        self._configure()
        if not self._is_applying:
            self._is_applying = True
            self.loop.start(self._apply())

    async def _apply(self) -> None:
        while self._applied_id < self.config_id:
            config, config_id = self.config, self.config_id
            failure = None
            if config.get("logging_config") != self._given["logging_config"]:
                failure = self._configure_logging(config)
            user_config, user_code = config["user_config"], self.user_code
            is_new = user_config != self._given["user_config"]
            if failure is None and user_code is not None and is_new:
                failure = await asyncio.wrap_future(user_code.reconfigure(user_config))
                self._given["user_config"] = user_config if failure is None else _REFUSED
            self._applied_id = config_id
            if self.state != "failed":  # else why is known
                self._failure = failure
            self._report()
        self._is_applying = False

    def _report(
        self,
        check_id: int = 0,
        failure: Failure | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Report to the controller; ``then`` is called when it was taken, or cannot be."""
        if self.controller is None:
            return
        if not check_id or self.state == "failed":
            # A new controller has to hear of a refused config again; health is another matter.
            failure = failure or self._failure
        environment, health = self._environment, self._health
        error, exception = "", None
        if failure is not None:  # whatever user code has raised: reports are repeated
            error, exception = bounded(failure.traceback, failure.exception)
        self.loop.send(
            self.controller,
            ReplicaReported(
                replica=self.tag,
                process=self.process,
                state=self.state,
                config_id=self._applied_id,
                check_id=check_id,
                queries_at=None if self.queries is None else self.queries.port.address,
                ongoing=0 if self.queries is None else self.queries.running,
                error=error,
                exception=exception,
                trouble=(environment and environment.trouble) or (health and health.trouble) or "",
                lasts=failure is not None and failure.lasts,
                stats={} if health is None else health.stats,
                worn=self._wear.why,
            ),
            on_sent=then,
            on_failed=then,
        )

    def _drain(self) -> None:
        queries, user_code = self.queries, self.user_code
        if queries is None or user_code is None:
            self._leave()
            return

        def drained() -> None:
            queries.report()
            self.loop.post(lambda: self.loop.start(self._close(user_code)))

        queries.when_drained(drained)

    async def _close(self, user_code: UserCode) -> None:
        failure = await asyncio.wrap_future(user_code.close())
        if failure is not None:
            logger.error("%s did not end well: %s", self.tag, failure.traceback)
        self._leave()

    def _leave(self) -> None:
        tracing.flush()
        self.exiting()


def _use_devices(order: StartReplica) -> None:
    try:
        os.environ.update(devices.variables(order.devices, os.environ))
    except ValueError as error:
        raise DeployFailedError(str(error)) from error


def _take_rank(order: StartReplica | CheckReplica) -> None:
    if order.rank is not None:
        *numbers, world_size = order.rank
        user_context.ranked(user_context.ReplicaRank(*numbers), world_size)
