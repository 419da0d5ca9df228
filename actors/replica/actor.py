"""The replica: one actor running one copy of the user's code.

The actor itself takes the controller's orders; queries go to its data plane (data_plane.py).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from greenroom.actors.cluster.epoch_fence import EpochFence
from greenroom.actors.environments import packages
from greenroom.actors.environments.folders import Arrival
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
from greenroom.core.config import RuntimeEnv, SessionAffinity
from greenroom.core.effects import CheckReplica, ReconfigureReplica, StopReplica
from greenroom.core.errors import DeployFailedError
from greenroom.core.lifecycle.replicas import bounded
from greenroom.core.metrics import Group
from greenroom.core.records import served_as

logger = logging.getLogger(__name__)

EXIT_CHECK_S = 0.02
# Containers more than there were. Python before 3.13 looks for garbage after 700, which 30 queries
# under way have: as none leaves any, that took a tenth of the time of a batched model, for nothing.
# More than 3.13's own default would let cycles of user code, which may hold tensors, live for long.
COLLECT_AFTER = 2_000
TELL_AFTER = 1 / 3  # of health_check_timeout_s without the end of any sync call, while others wait


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
        self._load_id: int | None = None  # the config's with which user code is loaded
        self.tag = ""  # known from the first order
        self.config: dict[str, Any] = {}
        self.config_id = 0  # the newest taken
        self._applied_id = 0  # the newest that user code has taken too
        self.state = "idle"
        self._failure: Failure | None = None  # of the constructor
        self._stats: dict[str, float] = {}  # of record_autoscaling_stats
        self._is_recording = False
        self._stats_failure = ""
        self._sickness = ""  # what its last health check raised
        self._refusal: Failure | None = None  # of reconfigure, on the newest settings
        self.user_code: UserCode | None = None
        self.queries: Queries | None = None
        self._arrivals: dict[str, Arrival] = {}  # by digest
        self._environment = ""  # the name of the virtual environment
        self._trouble = ""  # that status is to show
        self._begun_loading_at = 0.0
        served = lambda: 0 if self.queries is None else self.queries.served  # noqa: E731
        self._wear = Wear(self.loop, served, self._worn, self._full)

    def may_beat(self) -> bool:
        """See :meth:`LoopActor.may_beat`; answers go over links of their own."""
        loops = [self.loop] if self.queries is None else [self.loop, self.queries.port.loop]
        return end_where_starved(*loops)

    # --- Lifecycle, by the controller's orders ------------------------------------------------

    def receiveMsg_StartReplica(self, message: StartReplica, sender: Address) -> None:
        """Load the code, once; a repeat, from this controller or a new one, gets a report."""
        if not self._is_for_me(message, sender):
            return
        if self._load_id is None:
            self._begin_loading(message)
        elif message.config_id > self.config_id:
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
        if self.user_code is None or self.state != "running":
            self._report(check_id=message.check_id)
        elif (failure := self._stuck(self.user_code)) is not None:
            self._report(check_id=message.check_id, failure=failure)
        else:
            self.loop.start(self._check(self.user_code, message.check_id))

    async def _check(self, user_code: UserCode, check_id: int) -> None:
        failure = await asyncio.wrap_future(user_code.check_health())
        text = "" if failure is None else failure.text
        if failure is not None and text != self._sickness:
            logger.error("%s failed its health check: %s", self.tag, failure.traceback)
        elif self._sickness and not text:
            logger.info("%s passes its health check again", self.tag)
        self._sickness = text
        self._report(check_id=check_id, failure=failure)
        if self.config["autoscaling_config"] is not None and not self._is_recording:  # it may hang
            await self._record(user_code)

    async def _record(self, user_code: UserCode) -> None:
        recording = user_code.autoscaling_stats()
        if recording is None:
            return
        self._is_recording = True
        recorded = await asyncio.wrap_future(recording)
        self._is_recording = False
        stats, text = ({}, recorded.text) if isinstance(recorded, Failure) else (recorded, "")
        if isinstance(recorded, Failure) and text != self._stats_failure:
            logger.error("%s: record_autoscaling_stats failed: %s", self.tag, recorded.traceback)
        self._stats_failure = text
        if stats != self._stats:
            self._stats = stats
            self._report()

    def _worn(self, why: str) -> None:
        logger.info("%s is to be replaced: %s", self.tag, why)
        self._report()

    def _full(self, why: str) -> None:
        """End at once, with what runs: neighbours need the memory."""
        logger.critical("%s ends: %s", self.tag, why)
        self._report(then=self.exiting)

    def _stuck(self, user_code: UserCode) -> Failure | None:
        """Record sync calls that hang; return why that makes this replica unhealthy.

        A call that a caller waits for may take as long as it likes; status only shows it.
        """
        stuck = user_code.stuck(self.config["max_ongoing_requests"], time.monotonic())
        most_s = self.config["health_check_timeout_s"]
        self._trouble = ""
        if stuck.busy_s >= most_s * TELL_AFTER:
            self._trouble = (
                f"all {stuck.threads} threads have been busy for {stuck.busy_s:.0f} s, and "
                f"{stuck.waiting} calls wait for one"
            )
            logger.warning("%s: %s", self.tag, self._trouble)
        if stuck.unwanted_s < most_s:
            return None
        text = (
            f"for {stuck.unwanted_s:.0f} s all sync calls that may run at once have been calls "
            "that no caller waits for any more: they hang, and nothing else can run"
        )
        logger.error("%s: %s", self.tag, text)
        return Failure(text, text, None)

    def receiveMsg_StopReplica(self, message: StopReplica, sender: Address) -> None:
        """Finish what runs, within ``drain_s``, then end the process."""
        if not self._is_for_me(message, sender) or self.state == "draining":
            return
        self.state = "draining"
        if self.queries is not None:
            self.queries.is_draining, self.queries.accepting = True, False
            self.queries.close_sockets()  # what they bring has no end to wait for
        self._report(then=self._drain)
        self.loop.call_later(max(message.drain_s, EXIT_CHECK_S), self._leave)

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
        self.state, self._begun_loading_at = "starting", time.monotonic()
        self.config, self.config_id = order.config, order.config_id
        self._load_id = order.config_id
        self._leave_record(order)
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
        failure = self._configure_logging(order.config)
        if failure is not None:
            self._loaded(failure)
        else:
            self.loop.start(self._load(order))

    async def _load(self, order: StartReplica) -> None:
        """Load the code where its packages and folders are, and have it pass a health check."""
        env = RuntimeEnv.read(order.runtime_env)
        os.environ.update(env.env_vars)
        try:
            if env.requirements is not None and not self._is_in_environment():
                await self._enter_environment(order, *env.requirements)
            user_code = self._prepare(order)
            _use_devices(order)
            tracing.start(
                order.backend,
                {
                    "service.instance.id": order.replica,
                    "service.version": order.version or "",
                    "host.name": self.settings.host_name,
                },
            )
            if env.folders:
                await self._enter_folders(order, env)
            if self.state != "starting":  # it was asked to stop meanwhile
                return
            loading = user_code.load(order.code, self.config["user_config"])
            failure = await asyncio.wrap_future(loading) or await self._first_check(user_code)
        except DeployFailedError as error:
            failure = Failure.of(DeployFailedError(str(error)))  # where it arose is of no help
        self._loaded(failure)

    def _prepare(self, order: StartReplica) -> UserCode:
        """Make what runs the code, in the interpreter that it is for."""
        yield_to_messages()
        gc.set_threshold(COLLECT_AFTER)
        # As Ray does. With a thread for each core, the BLAS threads of small batches wait for the
        # cores of other processes: a numpy model had a fourth of its speed.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(order.num_cpus))))
        self.user_code = user_code = UserCode()
        _configure(user_code, self.config)
        self._wear.configure(self.config)
        settings = self.settings
        port = Port(settings.admin_port, self.process, user_code.loop, machine=self.machine)
        limit = self.config["max_ongoing_requests"]
        comparisons = Comparisons(port, self._comparisons_found)
        self.queries = Queries(port, user_code, order.replica, order.backend, limit, comparisons)
        self.queries.configure(self.config)
        SharedMetrics(self._metrics).keep_showing(self.loop.call_later)
        user_code.start()
        return user_code

    def _metrics(self) -> list[Group]:
        ongoing = 0 if self.queries is None else self.queries.running
        return metrics.collect(ongoing, len(user_context.model_ids()))

    def _leave_record(self, order: StartReplica) -> None:
        """Let this host's processes know of this one."""
        redirect_output(self.settings, replica_log(order.replica))
        env = RuntimeEnv.read(order.runtime_env)
        if self._is_in_environment():
            self._environment = Path(sys.prefix).name
        elif env.requirements is not None:
            self._environment = packages.name_of(*env.requirements)
        self.records.add(
            self.process,
            "replica",
            f"replica {order.replica}",
            tag=order.replica,
            address=getattr(self.myAddress.addressDetails, "text", ""),
            folders=",".join(env.folders),
            environment=self._environment,
        )

    def _is_in_environment(self) -> bool:
        return Path(sys.prefix).parent == self.settings.environments_dir

    async def _enter_environment(
        self, order: StartReplica, installer: str, lines: tuple[str, ...]
    ) -> None:
        """Go on in the environment's interpreter when the packages that the code requires are here.

        It gets the order once more, with the settings that are newest by then.
        """
        folder = self.settings.environments_dir / self._environment
        self._trouble = f"{installer} installs {', '.join(lines)}"
        try:
            await packages.prepare(folder, installer, lines)
        finally:
            self._trouble = ""
        if self.state != "starting":
            raise DeployFailedError("it was told to stop meanwhile")
        packages.enter(folder)
        newest = replace(order, config=self.config, config_id=self.config_id)
        try:
            self.continue_in(packages.python_of(folder), newest, self.controller)
        except OSError as error:
            raise DeployFailedError(f"{folder}: {error}") from error

    async def _enter_folders(self, order: StartReplica, env: RuntimeEnv) -> None:
        """Let the code find its folders when they are here."""

        def ask(digest: str) -> None:
            self.loop.send(self.controller, FetchFolder(replica=order.replica, digest=digest))

        folders = self.settings.folders_dir
        self._arrivals = {
            digest: Arrival(folders, digest, partial(ask, digest)) for digest in env.folders
        }
        await asyncio.gather(*(arrival.end() for arrival in self._arrivals.values()))
        sys.path[:0] = [str(folders / digest) for digest in env.folders]
        if env.working_dir is not None:
            os.chdir(folders / env.folders[0])

    def receiveMsg_FolderFetched(self, message: FolderFetched, _sender: Address) -> None:
        """See :meth:`Arrival.arrived`."""
        if (arrival := self._arrivals.get(message.digest)) is not None:
            content = None if message.content is None else message.content.view
            arrival.arrived(content, message.error)

    def _configure_logging(self, config: dict[str, Any]) -> Failure | None:
        wanted: Any = config.get("logging_config")
        try:
            user_logging.configure(wanted, self.tag)
        except OSError as error:
            text = f"logs_dir={wanted['logs_dir']!r} of logging_config cannot be used: {error}"
            return Failure.of(DeployFailedError(text))
        return None

    def _comparisons_found(self, found: dict[Place, Plain]) -> None:
        """Report to the controller what comparing answers found; called on user code's loop."""
        report = ComparisonsReported(process=self.process, found=found)
        self.loop.post(lambda: self.loop.send(self.controller, report))

    async def _first_check(self, user_code: UserCode) -> Failure | None:
        """Return why it fails its health check: that counts as if the constructor had raised."""
        within_s = self.config["health_check_timeout_s"]
        try:
            check = asyncio.wrap_future(user_code.check_health())
            return await asyncio.wait_for(check, within_s)
        except TimeoutError:
            text = f"check_health has not returned within {within_s:g} s, health_check_timeout_s"
            return Failure.of(DeployFailedError(text))

    def _loaded(self, failure: Failure | None) -> None:
        self._failure = failure
        if failure is not None:
            logger.error("%s could not start: %s", self.tag, failure.traceback)
        self._applied_id = max(self._applied_id, self._load_id or 0)
        if self.state == "starting":
            self.state = "failed" if failure is not None else "running"
            metrics.started(time.monotonic() - self._begun_loading_at)
            if failure is None:
                self._wear.begin()
            if self.queries is not None:
                self.queries.accepting = failure is None
        self._report()

    def _apply_config(self, config: dict[str, Any], config_id: int) -> None:
        """Take newer settings; they count as applied when user code has taken its part of them."""
        changed = config["user_config"] != self.config["user_config"]
        logs_changed = config.get("logging_config") != self.config.get("logging_config")
        self.config, self.config_id = config, config_id
        if self.queries is not None:
            self.queries.configure(config)
        self._wear.configure(config)
        if self.user_code is not None:
            _configure(self.user_code, config)
        failure = self._configure_logging(config) if logs_changed else None
        if failure is None and changed and self.user_code is not None:
            self.loop.start(self._reconfigure(self.user_code, config["user_config"], config_id))
        else:
            self._applied(config_id, failure)

    async def _reconfigure(self, user_code: UserCode, user_config: Any, config_id: int) -> None:
        self._applied(config_id, await asyncio.wrap_future(user_code.reconfigure(user_config)))

    def _applied(self, config_id: int, failure: Failure | None) -> None:
        self._applied_id, self._refusal = max(self._applied_id, config_id), failure
        self._report()

    def _report(
        self,
        check_id: int = 0,
        failure: Failure | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Report to the controller; ``then`` is called when it was taken, or cannot be."""
        if self.controller is None:
            return
        if not check_id:  # a new controller has to hear of it again; health is another matter
            failure = failure or self._refusal
        failure = failure or self._failure
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
                trouble=self._trouble,
                lasts=failure is not None and failure.lasts,
                stats=self._stats,
                worn=self._wear.why,
            ),
            on_sent=then,
            on_failed=then,
        )

    def _drain(self) -> None:
        queries = self.queries
        # What a caller sent under a lease that is still open may be on its way.
        if queries is not None and (queries.running or queries.undelivered or queries.leases):
            self.loop.call_later(EXIT_CHECK_S, self._drain)
        elif self.user_code is None:
            self._leave()
        else:
            if queries is not None:
                queries.report()
            self.loop.start(self._close(self.user_code))

    async def _close(self, user_code: UserCode) -> None:
        await asyncio.wrap_future(user_code.close())
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


def _configure(user_code: UserCode, config: dict[str, Any]) -> None:
    """Give user code the settings that hold for its queries; older records lack some."""
    affinity = config.get("session_affinity")
    user_code.http_call_methods = config.get("http_call_methods", ())
    user_code.session_affinity = None if affinity is None else SessionAffinity.read(affinity)
    user_code.served_by_header = config.get("served_by_header", False)
    user_code.set_max_ongoing_requests(config["max_ongoing_requests"])
