"""Canaries: a new version of a whole application beside the running one, until it takes over.

Theory of operation. The new version is an application of its own, the *candidate*, with a name made
of the other's (``shop~new``), all of its deployments, and no route. Handles of its code call its
own deployments (actors/replica/context.py), so composed applications are compared as a whole. A
rollout moves the traffic of the running ingress to the candidate's, and goes back by its rules.

    start          candidate's definitions, rollout, shadow         state "rolling out"
    rollout ended  promoted: the definitions of the new version,    "taking over"
                   as one change in the history
                   else: nothing                                    "went back"
    new version up the overlay goes, so the traffic is its own      "promoted"
    at the end     the candidate is deleted, its ingress first: it may still call the others
    candidate gone the goal ends; only then may the next canary use its names

Nothing of this is a definition but the change at the promotion: the rollout lies over the
endpoint, and so does the candidate while it takes over; what is of candidates enters no history. If
the application's definitions change otherwise meanwhile, as by an undo, the canary goes back.

While it takes over, the candidate has all traffic, so the update behind it costs no query. The
record is saved with each of these steps, so another controller goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from greenroom.core.agenda import HELD
from greenroom.core.comparing.comparing import AllDifferences
from greenroom.core.errors import ConflictError, GreenroomError
from greenroom.core.lifecycle import definitions
from greenroom.core.lifecycle.endpoints import Overlay, with_shadow
from greenroom.core.lifecycle.goals import Progress
from greenroom.core.lifecycle.releases import digests_of
from greenroom.core.lifecycle.state import Change, State
from greenroom.core.operations import Canary, ShadowTraffic, StartRollout
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    CANARY,
    ENDPOINT,
    ROLLOUT,
    ApplicationRecord,
    BackendDefinition,
    CanaryRecord,
    Definition,
    Definitions,
    EndpointRecord,
    Records,
    candidate_of,
    served_as,
)
from greenroom.core.rollouts.rollouts import BY_ITSELF, ENDED, PROMOTED, WENT_BACK, Rollouts
from greenroom.core.transitions import follow

ROLLING_OUT, TAKING_OVER = "rolling out", "taking over"  # before the ends of rollouts
NEXT = {
    ROLLING_OUT: (TAKING_OVER, WENT_BACK),
    TAKING_OVER: (PROMOTED, WENT_BACK),
    **dict.fromkeys(ENDED, (ROLLING_OUT,)),  # of another one
}
STEP_BY_STEP = "deploy application, step by step"  # a goal that goes by the canary
SHOWN_CAUSES = 3  # of answers that were different


class Canaries:
    """The last canary of each application."""

    def __init__(
        self,
        state: State,
        rollouts: Rollouts,
        differences: AllDifferences,
        records: Mapping[str, CanaryRecord],
    ) -> None:
        self._state = state
        self._rollouts = rollouts
        self._differences = differences
        self._records = Records(CANARY, records, state.changes)
        for record in records.values():
            self._hold_code(record)
            if record.state == TAKING_OVER:
                state.lay(self._ingress(record), Overlay({record.to: 1.0}))
        state.agenda.touch(CANARY, *records, *map(served_as, state.applications))

    # --- Requests -------------------------------------------------------------------------------

    def is_for(self, name: str, wanted: Definitions) -> bool:
        """Return whether a deploy can be a canary: of an application that runs, with other code."""
        present = self._state.definition((APPLICATION, name))
        if not isinstance(present, ApplicationRecord):
            return False
        if definitions.qualified(name, present.ingress) not in self._state.endpoints:
            return False
        tags = [definitions.qualified(name, each) for each in present.deployments]
        backends = [self._state.backends[tag] for tag in tags if tag in self._state.backends]
        return all(each.record.was_running for each in backends) and any(
            isinstance(each, BackendDefinition) and self._state.definition(key) != each
            for key, each in wanted.items()
        )

    def is_under_way(self, name: str, wanted: Definitions) -> bool:
        """Return whether this is what a canary brings; ConflictError while it brings another."""
        record = self._records.get(name)
        if record is None or record.state in ENDED:
            return False
        if _without_traffic(record.wanted) == _without_traffic(wanted):
            return True
        raise ConflictError(
            f"a new version of application {name!r} takes over step by step; wait for it, or end "
            f"it first: greenroom rollout {record.endpoint!r} --abort, or --promote"
        )

    def start(
        self,
        name: str,
        wanted: Definitions,
        settings: Canary,
        code: Mapping[str, bytes],
        wall_now: float,
    ) -> tuple[Change, ...]:
        """Return what brings up the new version beside the running one; the goal is its end."""
        state = self._state
        present, new = state.applications[name], wanted[APPLICATION, name]
        if not isinstance(new, ApplicationRecord):
            raise TypeError("a canary is of definitions of an application")
        record = CanaryRecord(
            application=name,
            wanted=dict(wanted),
            before={key: state.definition(key) for key in wanted},
            settings=settings.model_dump(),
            endpoint=definitions.qualified(name, present.ingress),
            to=definitions.qualified(candidate_of(name), new.ingress),
        )
        self._rollouts.check_traffic(record.endpoint)  # before anything is written
        if candidate_of(name) in state.applications:
            raise ConflictError(
                f"the last new version of application {name!r} has queries to finish; deploy "
                f"again when greenroom status no longer shows {candidate_of(name)!r}"
            )
        mirrored = Overlay({})
        if settings.compare is not None:
            shadow = ShadowTraffic(
                endpoint=record.endpoint,
                backend=record.to,
                proportion=settings.steps[0],
                compare=settings.compare,
            )
            alone = EndpointRecord(name=record.endpoint)
            shadowed = with_shadow(alone, shadow)
            mirrored = Overlay({}, shadowed.shadows, shadowed.compares)
        rules = settings.model_dump(exclude={"compare"})
        rollout = StartRollout(endpoint=record.endpoint, to=record.to, **rules)
        return (
            Change(wanted=_candidate(name, wanted), code=code),
            self._rollouts.start(rollout, wall_now, mirrored),
            Change(then=lambda: self._put(record), subject=(APPLICATION, name), what=STEP_BY_STEP),
        )

    def forget(self, name: str) -> None:
        """Drop what is known of an application's last canary; it must have ended."""
        if self._records.pop(name, None) is not None:
            self._state.agenda.touch(APPLICATION, name)
            self._state.code_use.hold((CANARY, name), ())

    def check_no_candidate(self, name: str) -> None:
        """Raise ConflictError if the application is the new version of another."""
        record = self._records.get(served_as(name))
        if name != served_as(name) and record is not None and record.state not in ENDED:
            raise ConflictError(
                f"application {name!r} is the new version of {served_as(name)!r}; end that with: "
                f"greenroom rollout {record.endpoint!r} --abort"
            )

    # --- Decisions ------------------------------------------------------------------------------

    def reconcile(self, name: str, wall_now: float) -> None:
        """Take the next step of an application's canary, if it has one; forget it with that."""
        agenda = self._state.agenda
        if (record := self._records.get(name)) is not None:
            self._advance(record, wall_now)
        if (record := self._records.get(name)) is not None:  # as it is now
            agenda.upon((APPLICATION, name), CANARY, name)
            if record.state not in ENDED:
                agenda.upon((ROLLOUT, record.endpoint), CANARY, name)
            if record.state == TAKING_OVER:
                agenda.upon(HELD, CANARY, name)
        self._retire(name)

    def _advance(self, record: CanaryRecord, wall_now: float) -> None:
        if self._state.definition((APPLICATION, record.application)) is None:
            self.forget(record.application)  # it was deleted
        elif record.state in ENDED:
            return
        elif self._is_changed(record):
            self._end(record, WENT_BACK, "the application was changed otherwise")
        elif record.state == ROLLING_OUT:
            self._follow_rollout(record, wall_now)
        else:
            self._take_over(record)

    def _is_changed(self, record: CanaryRecord) -> bool:
        """Return whether the application's code or settings are no longer those that there were."""
        there = record.before if record.state == ROLLING_OUT else record.wanted
        for key, definition in there.items():
            if (
                isinstance(definition, BackendDefinition)
                and self._state.definition(key) != definition
            ):
                backend = self._state.backends.get(key[1])
                if backend is None or not backend.record.update_failure:  # it went back by itself
                    return True
        return False

    def _follow_rollout(self, record: CanaryRecord, wall_now: float) -> None:
        rollout = self._rollouts.records.get(record.endpoint)
        if rollout is None:
            self._end(record, WENT_BACK, "its rollout is lost")
        elif rollout.state == PROMOTED:
            try:
                self._define_new(record, wall_now)
            except GreenroomError as error:  # its route was taken meanwhile
                self._end(record, WENT_BACK, str(error))
        elif rollout.state in ENDED:
            self._end(record, WENT_BACK, rollout.reason)

    def _define_new(self, record: CanaryRecord, wall_now: float) -> None:
        """Begin the update of the application, while the candidate serves."""
        definitions.check_routes(self._state, record.wanted)
        found = self._compared(record)
        wanted, name = dict(record.wanted), self._ingress(record)
        wanted[ENDPOINT, name] = replace(wanted[ENDPOINT, name], traffic={name: 1.0})
        what = f"application {record.application!r}: its new version takes over"
        self._state.apply(BY_ITSELF, what, Change(wanted=wanted), wall_now)
        self._state.lay(name, Overlay({record.to: 1.0}))
        self._put(replace(record, state=TAKING_OVER, reason=found))

    def _ingress(self, record: CanaryRecord) -> str:
        """Return the endpoint of the new version's ingress."""
        return definitions.qualified(record.application, record.to.partition("#")[2])

    def _take_over(self, record: CanaryRecord) -> None:
        progress = definitions.application_progress(self._state, record.application)
        if progress.error:
            self._end(record, WENT_BACK, progress.error)
        elif progress.done:
            self._end(record, PROMOTED, record.reason)

    def _end(self, record: CanaryRecord, state: str, reason: str) -> None:
        """Give the traffic back to the application, and delete the candidate."""
        compared = self._compared(record) if state == WENT_BACK else ""
        if compared not in reason:
            reason = f"{reason}; {compared}"
        self._put(replace(record, state=state, reason=reason))
        self._rollouts.interrupt(record.endpoint, reason)
        self._state.lay(self._ingress(record), None)

    def _retire(self, name: str) -> None:
        """Delete a candidate that has ended: its ingress, and once that is gone what it has called.

        So is one deleted whose record is lost.
        """
        record, candidate = self._records.get(name), candidate_of(name)
        application = self._state.applications.get(candidate)
        is_under_way = record is not None and record.state not in ENDED
        if application is None or application.deleting or is_under_way:
            return
        self._state.agenda.upon((APPLICATION, candidate), CANARY, name)
        to = definitions.qualified(candidate, application.ingress)
        wanted: Definitions = {(ENDPOINT, to): None, (BACKEND, to): None}
        if to not in self._state.backends:
            wanted = definitions.without_application(self._state, candidate)
        self._state.apply(BY_ITSELF, "", Change(wanted=wanted), 0.0)  # it is not in the history

    def _compared(self, record: CanaryRecord) -> str:
        rollout = self._rollouts.records.get(record.endpoint)
        compare = None if rollout is None else rollout.compares.get(rollout.to)
        if compare is None:
            return record.reason
        found = self._differences.of((record.endpoint, record.to, compare.id))
        compared, different = found["compared"], found["different"]
        if not compared:
            return "NO ANSWERS WERE COMPARED before it took over: a longer hold_s gives them time"
        finding = f"{different} of {compared} compared answers were different"
        causes = [each for each in found["causes"] if each["comparable"]][:SHOWN_CAUSES]
        if causes:
            often = ", ".join(f"{each['count']} x {each['cause']}" for each in causes)
            finding += f" ({often})"
        return f"MOST ANSWERS DIFFER: {finding}" if different > compared / 2 else finding

    def _put(self, record: CanaryRecord) -> None:
        if (before := self._records.get(record.application)) is not None:
            follow(NEXT, before.state, record.state)
        self._records[record.application] = record
        self._state.agenda.touch(CANARY, record.application)
        self._state.agenda.touch(APPLICATION, record.application)  # whose goals go by it
        self._hold_code(record)

    def _hold_code(self, record: CanaryRecord) -> None:
        """Keep the code of both versions until one of them is what there is."""
        held = [*record.wanted.values(), *record.before.values()] * (record.state not in ENDED)
        self._state.code_use.hold((CANARY, record.application), digests_of(*held))

    # --- How they are shown ---------------------------------------------------------------------

    def progress(self, name: str) -> Progress | None:
        """Describe how far an application's canary is; None where the application itself says."""
        record = self._records.get(name)
        if record is None:
            return None
        if record.state not in ENDED or candidate_of(name) in self._state.applications:
            return Progress()
        if record.state == PROMOTED:
            return None
        return Progress(error=f"the new version of application {name!r} went back: {record.reason}")

    def status(self, name: str) -> dict[str, Any] | None:
        """Return where an application's last canary stands, as plain values; None without one."""
        record = self._records.get(name)
        if record is None:
            return None
        why = record.reason
        if record.state == ROLLING_OUT:
            why = self._rollouts.describe(record.endpoint)
        return {"state": record.state, "why": why, "endpoint": record.endpoint, "to": record.to}


def _candidate(name: str, wanted: Definitions) -> Definitions:
    """Return the definitions of the candidate: those of the new version under other names."""
    candidate = candidate_of(name)
    made: dict[tuple[str, str], Definition | None] = {}
    for (kind, each), definition in wanted.items():
        own = candidate + each.removeprefix(name)
        if isinstance(definition, ApplicationRecord):
            made[kind, own] = replace(definition, name=candidate, route_prefix=None)
        elif isinstance(definition, BackendDefinition):
            made[kind, own] = replace(definition, application=candidate)
        elif isinstance(definition, EndpointRecord):
            made[kind, own] = EndpointRecord(
                name=own,
                traffic={own: 1.0},
                application=candidate,
                deployment=definition.deployment,
            )
    return made


def _without_traffic(wanted: Definitions) -> Definitions:
    return {key: each for key, each in wanted.items() if key[0] in {APPLICATION, BACKEND}}
