"""The next steps of a backend: which replicas to start, to retire and to replace, and where.

An update is rolling: replicas of the new release start first, and old ones stop as new ones run. At
most :func:`surge` replicas more than wanted, or than were, have a process at any time, those that
drain among them.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable

from greenroom.core.agenda import NEVER
from greenroom.core.effects import Effect
from greenroom.core.lifecycle import failures, health, releases
from greenroom.core.lifecycle.backend import Backend, count_running
from greenroom.core.lifecycle.placement import request_of
from greenroom.core.lifecycle.replicas import LEAVING, Replica, ReplicaState, RestartReason, rank
from greenroom.core.records import Release


def reconcile(backend: Backend, publish: Callable[[Backend], bool], now: float) -> list[Effect]:
    """Take the next steps toward what is wanted.

    ``publish`` makes its table the newest, and returns whether every proxy holds it already.
    """
    backend.forget_stopped()  # first, so that what they had is free for others
    backend.start_due_at, backend.waiting = NEVER, ""
    effects = health.fail_silent(backend, now)
    health.retire_unhealthy(backend, now)
    _replace_worn(backend, now)
    _choose(backend, now)
    _rank(backend)
    released = publish(backend)
    orders = backend.orders
    for replica in backend.replicas.values():
        effects += orders.next(replica, now, released=released)
    backend.record_replicas()
    converged = backend.converged
    if backend.wanted and converged:
        backend.failures.came_up()
        backend.proven = True
        if not backend.record.newest.ran:
            backend.record = releases.with_newest(backend.record, ran=True)
    lost = len(backend.in_state(ReplicaState.LOST))
    if converged and len(backend.replicas) - lost == backend.wanted:
        backend.rescaling = ""
    backend.record = releases.pruned(backend.record)
    return effects


def _choose(backend: Backend, now: float) -> None:
    """Decide which replicas to add and which to retire, in favour of those that are to stay."""
    wanted = backend.wanted
    if not wanted and backend.record.capacity:
        backend.update(capacity=0)  # what autoscaling ended is not brought back by an update
    is_update, live = bool(wanted) and backend.updating, backend.live()
    newest = backend.record.newest
    old = [r for r in live if (r.release != newest.number if is_update else r.moving)]
    new = [r for r in live if (r.release == newest.number if is_update else not r.moving)]
    # In an update, what runs has to be known first, and so what is missing.
    if not (is_update and any(replica.recovering for replica in live)):
        running, capacity, room, start_old = count_running(new), wanted, wanted, 0
        earlier = releases.fallback(backend.record) if is_update else None
        if is_update:
            capacity = backend.record.capacity
            leaving = sum(r.state in LEAVING for r in backend.replicas.values())
            room = max(wanted, capacity) + surge(backend) - len(live) - leaving
        keep = max(capacity - running, 0) if running < wanted else 0
        if earlier is None:  # what has never come up in full is not waited for
            keep = min(keep, count_running(old) if is_update else len(old))
        elif running < wanted:  # in place of old ones that died
            start_old = max(min(keep - len(old), room), 0)
        _retire_surplus(backend, old, len(old) - keep, now)
        if running < wanted:
            _add(backend, min(wanted - len(new), room - start_old), newest, now)
        if earlier is not None:
            _add(backend, start_old, earlier, now)
    _retire_surplus(backend, new, len(new) - wanted, now)


def surge(backend: Backend) -> int:
    """Return how many replicas an update may have beyond what is wanted, at least one."""
    return max(math.ceil(backend.wanted * backend.config.max_surge_percent / 100), 1)


def _add(backend: Backend, count: int, release: Release, now: float) -> None:
    if count <= 0:
        return
    start_at = backend.failures.pause_ends_at(release.number, *failures.OF_STARTS)
    if now < start_at:
        backend.start_due_at = min(backend.start_due_at, start_at)
        return
    avoided = backend.failures.avoided(release.number, now)
    request = request_of(release.actor_options, backend.config.max_replicas_per_host)
    for _ in range(count):
        # Siblings are not those that leave: code that cannot start on a host would be moved
        # about, and found out or not by chance. Nor those of another release, which go as
        # these come: where every host has as many as it may, nothing could be updated.
        siblings = Counter(r.host for r in backend.live() if r.release == release.number)
        host = backend.placement.choose(request, siblings, avoided)
        if host is None:
            backend.waiting = backend.placement.why_not(request, siblings)
            return
        tag = f"{backend.record.tag}#{secrets.token_hex(3)}"
        backend.add(Replica(tag, release.number, host, since=now))


def _retire_surplus(backend: Backend, live: list[Replica], surplus: int, now: float) -> None:
    """Retire so many: those that do not run, then from the most crowded hosts."""
    if any(replica.recovering for replica in live):
        # Their reports will tell which of them run, and which were asked to stop already.
        # And a process that this controller has never asked to start cannot be asked to stop.
        live = [] if backend.wanted else [r for r in live if not r.recovering]
    crowded = Counter(replica.host for replica in live)
    for _ in range(min(surplus, len(live))):
        goes = min(
            live,
            key=lambda r: (
                r.state is ReplicaState.RUNNING,
                not r.moving,
                -crowded[r.host],
                -r.since,
            ),
        )
        live.remove(goes)
        crowded[goes.host] -= 1
        goes.retire(now)


def _replace_worn(backend: Backend, now: float) -> None:
    """Have worn replicas replaced by fresh ones: as many at a time as an update may start."""
    running = backend.in_state(ReplicaState.RUNNING)
    worn = [replica for replica in running if replica.worn and not replica.moving]
    room = surge(backend) - sum(replica.moving for replica in running)
    if backend.updating or not worn or room <= 0:
        return
    start_at = backend.failures.pause_ends_at(backend.record.newest.number, failures.WEAR)
    if now < start_at:
        backend.start_due_at = start_at
        return
    for replica in worn[:room]:
        replica.moving = True
        backend.failures.count_restart(replica, RestartReason.parse(replica.worn))
        backend.failures.add(failures.WEAR, replica, now, replica.worn_at - replica.since)


def _rank(backend: Backend) -> None:
    """Give the living replicas their numbers, once all that are recorded were heard of.

    One that is recorded may have been on its way to its end: its number may be another's by
    now. If that were recorded as well, a controller that dies after each checkpoint would
    change the numbers back and forth, and come no further.
    """
    live = backend.live()
    if not any(each.recovering for each in live) or any(each.rank is None for each in live):
        rank(live)


def rebalance(backend: Backend, held: Counter[str], now: float) -> int:
    """Replace replicas on hosts that have too many elsewhere; return how many.

    Those are hosts with two more of this backend's replicas than others, or with one more where
    the other host is freer and holds two less of all: ``held`` counts these, and is changed as
    replicas will move. An update places anew anyway, so nothing is moved while one goes on.
    """
    if backend.updating:
        return 0
    live = [r for r in backend.in_state(ReplicaState.RUNNING) if not r.moving]
    avoided = backend.failures.avoided(backend.record.newest.number, now)
    own = Counter(replica.host for replica in live if replica.host not in avoided)
    request = request_of(backend.record.newest.actor_options, backend.config.max_replicas_per_host)
    hosts = [host for host in backend.placement.fitting(request, own) if host not in avoided]

    def order(host: str) -> tuple[int, int]:
        return own[host], held[host]

    moved = 0
    while own and hosts:
        most, least = max(own, key=order), min(hosts, key=order)
        more = own[most] - own[least]
        is_freer = backend.placement.is_freer(least, most, request.needs)
        if more < 1 or (more == 1 and not (is_freer and held[most] - held[least] > 1)):
            break
        next(r for r in live if r.host == most and not r.moving).moving = True
        for counts in (own, held):
            counts[most] -= 1
            counts[least] += 1
        moved += 1
    return moved
