"""Request routers of users, each in a child process of the proxy's, asked in bounded time.

Theory of operation. A backend's request router is asked about each of its queries before the router
gets the query. The query goes on with the answer, or without one when the time is up, when the
answer is no use, or when the process is gone: then it is routed as if there were no request router.
What goes wrong is counted, and logged now and then. A process is first sent what to make, and asked
once it has made that; one that has answered nothing for SILENT_S is killed, and started again (see
actors/plugins/child.py). Nothing else waits meanwhile, and limits and retries are the router's.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from greenroom.actors.plugins.child import LOAD_TIMEOUT_S, Answer, Child
from greenroom.actors.plugins.program import ASKED, BEGUN, REQUEST_ROUTER, ROUTED
from greenroom.actors.proxy.host_metrics import Metrics
from greenroom.actors.runtime.loop import Loop, Timer
from greenroom.actors.runtime.records import RunRecords
from greenroom.actors.runtime.settings import HostSettings
from greenroom.core.config import RequestRouterConfig
from greenroom.core.routing.balancing import RoutedBackend
from greenroom.core.routing.router import Router
from greenroom.core.routing.tickets import NewQuery, Preference

logger = logging.getLogger(__name__)

SILENT_S = 5.0
LOG_S = 10.0
MAX_OPEN = 1_000  # questions to one process


class _Question(NamedTuple):
    new: NewQuery
    backend: str
    asked_at: float
    timer: Timer


class _Asked:
    """One backend's request router, and its process."""

    def __init__(self, config: RequestRouterConfig, child: Child) -> None:
        self.config = config
        self.child = child
        self.is_ready = False
        self.open = 0  # questions
        self.silent_since: float | None = None  # when it got the first question it has not answered
        self.timer: Timer | None = None  # until it is ready, or may be started again
        self.logged_at = float("-inf")
        self.unlogged = 0


class RequestRouters:
    """All request routers of a proxy. ``submit`` gets each query of which one was asked."""

    def __init__(
        self,
        loop: Loop,
        settings: HostSettings,
        records: RunRecords,
        router: Router,
        metrics: Metrics,
        submit: Callable[[NewQuery, Preference], None],
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._records = records
        self._router = router
        self._metrics = metrics
        self._submit = submit
        self._asked: dict[str, _Asked] = {}  # by backend
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._by_query: dict[tuple[Hashable, int], int] = {}  # (caller, query id) -> question

    def take(self, backend: str, settings: Mapping[str, Any] | None) -> None:
        """Follow a backend's newest table: its request router's settings, None for none."""
        config = None if settings is None else RequestRouterConfig.read(settings)
        asked = self._asked.get(backend)
        if asked is not None and asked.config != config:
            self._stop(backend, asked)
            asked = None
        if asked is None and config is not None:
            child = Child(
                self._loop,
                self._settings,
                self._records,
                role=REQUEST_ROUTER,
                name=backend,
                code=config.code,
                on_answer=lambda answer: self._heard(backend, answer),
                on_end=lambda why: self._child_ended(backend, why),
            )
            self._asked[backend] = _Asked(config, child)
            self._begin(backend)

    def ask(self, new: NewQuery) -> bool:
        """Ask about a query; return False where there is nothing to ask, and it goes on at once."""
        if not self._asked:
            return False
        if (new.caller, new.query.id) in self._by_query:
            return True  # it came again
        routed = self._router.to_ask(new.caller, new.query)
        asked = None if routed is None else self._asked.get(routed.table.tag)
        if routed is None or asked is None:
            return False
        backend, number, now = routed.table.tag, next(self._numbers), time.monotonic()
        problem = "" if asked.is_ready else "its process has not begun"
        if asked.open >= MAX_OPEN:
            problem = f"it has {MAX_OPEN} questions to answer"
        if problem or (problem := self._send(asked, _question(number, new, routed, asked.config))):
            self._metrics.asked(backend, "unavailable", 0.0)
            self._log(backend, asked, problem)
            return False
        timer = self._loop.call_later(asked.config.timeout_s, lambda: self._late(number))
        self._questions[number] = _Question(new, backend, now, timer)
        self._by_query[new.caller, new.query.id] = number
        asked.open += 1
        if asked.silent_since is None:
            asked.silent_since = now
        return True

    def routed(self, preference: Preference, replica: str) -> None:
        """Tell a request router which replica a query of which it was asked went to."""
        asked = self._asked.get(preference.backend)
        if asked is not None and asked.is_ready and preference.number:
            self._send(asked, (ROUTED, preference.number, replica))

    def cancel(self, caller: str, query_id: int) -> None:
        """Drop a query of which one is asked at present."""
        if (number := self._by_query.get((caller, query_id))) is not None:
            self._close(number)

    def caller_gone(self, caller: str) -> None:
        """Drop the queries of a caller that is gone."""
        for number, question in list(self._questions.items()):
            if question.new.caller == caller:
                self._close(number)

    # --- Inside ---------------------------------------------------------------------------------

    def _begin(self, backend: str) -> None:
        """Start a process, and send it what to make; later, where it may not be started yet."""
        asked = self._asked[backend]
        child, kwargs = asked.child, asked.config.request_router_kwargs
        if problem := self._send(asked, (BEGUN, backend, self._settings.host_name, kwargs)):
            self._log(backend, asked, problem)
            asked.timer = self._loop.call_later(child.pause_s, lambda: self._begin(backend))
        else:
            problem = f"it was not made within {LOAD_TIMEOUT_S:g} s; it was killed"
            asked.timer = self._loop.call_later(LOAD_TIMEOUT_S, lambda: child.fail(problem))

    def _stop(self, backend: str, asked: _Asked) -> None:
        del self._asked[backend]
        if asked.timer is not None:
            asked.timer.cancel()
        asked.child.end()
        self._go_on_all(backend, "unavailable")

    def _send(self, asked: _Asked, what: tuple[Any, ...]) -> str:
        return asked.child.send(pickle.dumps(what))

    def _heard(self, backend: str, answer: Answer) -> None:
        asked = self._asked[backend]
        asked.silent_since = None
        if not asked.is_ready:  # the first frame
            asked.is_ready = True
            if asked.timer is not None:
                asked.timer.cancel()
            return
        number, ranks, error = _read(answer)
        if number not in self._questions:
            return  # it was late
        if error:
            self._log(backend, asked, error)
            self._go_on(number, "failed")
        else:
            self._go_on(number, "chosen" if any(ranks) else "none", ranks)

    def _child_ended(self, backend: str, why: str) -> None:
        asked = self._asked[backend]
        asked.is_ready, asked.silent_since = False, None
        self._log(backend, asked, why)
        if asked.timer is not None:
            asked.timer.cancel()
        asked.timer = self._loop.call_later(asked.child.pause_s, lambda: self._begin(backend))
        self._go_on_all(backend, "failed")

    def _late(self, number: int) -> None:
        backend = self._questions[number].backend
        asked = self._asked[backend]
        self._go_on(number, "late")
        self._log(backend, asked, f"no answer within {asked.config.timeout_s:g} s")
        since = asked.silent_since
        if since is not None and time.monotonic() - since > SILENT_S:
            asked.child.fail(f"no answer within {SILENT_S:g} s; it was killed")

    def _go_on(self, number: int, outcome: str, ranks: tuple[tuple[str, ...], ...] = ()) -> None:
        question = self._close(number)
        waited_s = time.monotonic() - question.asked_at
        self._metrics.asked(question.backend, outcome, waited_s)
        self._submit(question.new, Preference(question.backend, number, ranks))

    def _go_on_all(self, backend: str, outcome: str) -> None:
        for number, question in list(self._questions.items()):
            if question.backend == backend:
                self._go_on(number, outcome)

    def _close(self, number: int) -> _Question:
        question = self._questions.pop(number)
        question.timer.cancel()
        del self._by_query[question.new.caller, question.new.query.id]
        if (asked := self._asked.get(question.backend)) is not None:
            asked.open -= 1
        return question

    def _log(self, backend: str, asked: _Asked, text: str) -> None:
        now = time.monotonic()
        if now - asked.logged_at < LOG_S:
            asked.unlogged += 1
            return
        more = f" ({asked.unlogged} more since the last line)" if asked.unlogged else ""
        logger.warning("the request router of %s is done without: %s%s", backend, text, more)
        asked.logged_at, asked.unlogged = now, 0


def _question(
    number: int, new: NewQuery, routed: RoutedBackend, config: RequestRouterConfig
) -> tuple[Any, ...]:
    replicas = [routed.replicas[tag] for tag in routed.inhabitable()]
    candidates = [(r.table.tag, r.table.host, r.load, tuple(r.models)) for r in replicas]
    limit = routed.table.max_ongoing_requests
    return (ASKED, number, new.query, limit, candidates, config.timeout_s)


def _read(answer: Answer) -> tuple[int, tuple[tuple[str, ...], ...], str]:
    """Return a question's number, the ranks, and an error; user code may have written anything."""
    try:
        ranks = tuple(tuple(map(str, rank)) for rank in answer.get("ranks", ()))
        return int(answer["number"]), ranks, str(answer.get("error", ""))
    except (ValueError, KeyError, TypeError, OverflowError):
        return 0, (), ""
