"""The code broken on purpose, to see whether the simulator notices: ``--mutation NAME``.

Each is a change of one text in one module, made when that is imported. One whose text is no longer
there is refused: then the table has to follow the code.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any, NamedTuple


class Mutation(NamedTuple):
    """``old`` becomes ``new`` in ``module``; ``breaks`` is what should be noticed.

    ``seed`` is where the search begins, for what the first seeds do not show. Once the code has
    changed so much that other seeds show it, finding it takes longer, and no more.
    """

    module: str
    old: str
    new: str
    breaks: str
    seed: int = 0


MUTATIONS = {
    "saves_after_the_answer": Mutation(
        "actors.controller",
        "            self._save(changes)\n",
        "            self.loop.call_later(0.3, lambda: self._save(changes))\n",
        "an acknowledged change is durable",
    ),
    "kills_when_the_machine_stood_still": Mutation(
        "core.silence",
        "        if passed_s < LATE_S:\n",
        "        if passed_s < 1e6:\n",
        "only what stands still itself is killed for its silence",
    ),
    "starts_replicas_before_it_saves": Mutation(
        "actors.controller",
        "        changes = self._cluster.take_changes()\n",
        "        [self._supervisor.perform(e) for e in effects]\n"
        "        effects, changes = [], self._cluster.take_changes()\n",
        "no replica lives that is not recorded",
    ),
    "answers_before_proxies_hold_it": Mutation(
        "core.long_poll",
        "        return self._seen_by_all() >= ",
        "        return True or self._seen_by_all() >= ",
        "a changed endpoint is acknowledged when every proxy routes by it",
    ),
    "forgets_at_a_restart_which_proxies_there_are": Mutation(
        "core.listeners",
        "            cluster.long_poll.expect(name)\n",
        "            pass\n",
        "a changed endpoint is acknowledged when every proxy routes by it",
        seed=208,
    ),
    "does_not_record_proxies": Mutation(
        "core.listeners",
        "            self._cluster.save(LISTENER, name, record)\n",
        "            pass\n",
        "a new controller knows every proxy that was told anything",
    ),
    "forgets_that_ids_go_on_after_a_restart": Mutation(
        "core.long_poll",
        "= epoch * IDS_PER_EPOCH",
        "= IDS_PER_EPOCH",
        "what proxies hold comes to what is saved",
    ),
    "forgets_backends_before_their_replicas": Mutation(
        "core.cluster",
        "        if backend.record.deleting and not backend.replicas:\n",
        "        if backend.record.deleting:\n",
        "no replica of a deleted backend lives",
    ),
    "keeps_tables_of_deleted_backends": Mutation(
        "core.cluster",
        "        self.long_poll.publish(BACKEND_PREFIX + tag, None)\n",
        "",
        "what proxies hold comes to what is saved",
    ),
    "carries_out_repeated_requests_again": Mutation(
        "core.history",
        "        return self._by_request.get(request_id)\n",
        "        return None\n",
        "a change that is acknowledged happened, and one that is refused did not",
    ),
    "rolls_back_to_what_was_deleted": Mutation(
        "core.releases",
        "    return replace(record, ran=False, earlier=earlier)\n",
        "    return replace(record, ran=False)\n",
        "what runs is what was last asked for, or what that update began with",
        seed=316,
    ),
    "never_ends_goals_of_failed_updates": Mutation(
        "core.goals",
        "            if now.error:\n",
        '            if now.error == "never":\n',
        "goals all end",
    ),
    "leaves_user_config_as_it_was": Mutation(
        "actors.replica",
        "        if failure is None and changed and self._user_code is not None:\n",
        "        if False:\n",
        "replicas come to have the newest settings",
    ),
    "overloads_replicas_from_the_router": Mutation(
        "core.balancing",
        "        end = min(limit, len(levels))\n",
        "        end = min(limit + 1, len(levels))\n",
        "max_ongoing_requests holds in the router",
    ),
    "overloads_the_replica": Mutation(
        "actors.queries",
        "room = max(self.limit - self.running, 0) if self.accepting else 0",
        "room = self.limit if self.accepting else 0",
        "max_ongoing_requests holds in the replica",
    ),
    "queues_one_too_many": Mutation(
        "core.queueing",
        "return 0 <= self.table.max_queued_requests <= self.queue.size",
        "return 0 <= self.table.max_queued_requests < self.queue.size",
        "max_queued_requests holds",
    ),
    "sends_where_the_weight_is_zero": Mutation(
        "core.traffic",
        "(tag, weight) for tag, weight in weights.items() if weight > 0)",
        "(tag, weight or 0.1) for tag, weight in weights.items())",
        "no traffic reaches a backend without weight",
    ),
    "leaves_queued_queries_where_they_were": Mutation(
        "core.routing",
        "        left = old.places() - new.places()  #",
        "        left = set()  #",
        "no traffic reaches a backend without weight",
    ),
    "repeats_what_may_not_be_repeated": Mutation(
        "core.repeats",
        "    return query.http_method in REPEATABLE_METHODS",
        "    return True",
        "a query that may not be repeated runs once",
    ),
    "repeats_answers_that_had_begun": Mutation(
        "core.repeats",
        "    if ticket.is_copy or ticket.begun or not may_repeat(",
        "    if ticket.is_copy or not may_repeat(",
        "a begun stream is never repeated",
    ),
    "adds_up_what_proxies_report_again": Mutation(
        "core.rollouts",
        "            run.counted[proxy] = counted\n",
        "            run.counted[f'{proxy} {len(run.counted)}'] = counted\n",
        "a rollout decides by what was really counted",
    ),
    "goes_on_without_queries": Mutation(
        "core.rollouts",
        "        if missing := judging.too_few(",
        "        if False and judging.too_few(",
        "a rollout goes on only after so many queries of the new backend",
        seed=16,
    ),
    "goes_on_whatever_the_evidence": Mutation(
        "core.rollouts",
        "        if evidence_of(record, run.evidence) < 1 / record.alpha:\n",
        "        run.evidence = dict.fromkeys(run.evidence, 0.0)\n        if True:\n",
        "a backend that only fails gets no further step",
        seed=158,
    ),
    "goes_back_to_another_traffic": Mutation(
        "core.rollouts",
        "{record.to: 1.0} if state == PROMOTED else dict(record.before)",
        "{record.to: 1.0} if state == PROMOTED else weights_at(record)",
        "a rollout that goes back leaves the traffic as it was before",
    ),
    "lets_others_set_the_traffic_of_a_rollout": Mutation(
        "core.cluster",
        "            self.rollouts.check_traffic(name)\n",
        "",
        "a rollout's weights are only those of its steps",
        seed=24,
    ),
    "forgets_rollouts_at_a_restart": Mutation(
        "core.rollouts",
        "            if record.state == UNDER_WAY\n",
        "            if False\n",
        "rollouts survive crashes of the controller, and their goals end",
    ),
    "undoes_a_part": Mutation(
        "core.history",
        "        if now == before:\n            continue\n",
        "        if now == before or key[0] == ENDPOINT:\n            continue\n",
        "an undo restores what was before",
        seed=7,
    ),
    "counts_comparisons_again_after_a_restart": Mutation(
        "core.differences",
        "            reports[replica] = plain\n",
        "            reports[replica, len(reports)] = plain\n",
        "what comparisons count is bounded by the copies that were made",
    ),
    "sends_again_to_the_next_proxy": Mutation(
        "core.routing",
        "        if resent and not may_be_resent(",
        "        if False and not may_be_resent(",
        "a query that may not be repeated runs once",
    ),
    "leaves_unwanted_streams_waiting": Mutation(
        "actors.dispatch",
        "                self._stop_at(sender, item.query_id)\n",
        "                pass\n",
        "no query and no slot is left anywhere",
        seed=27,
    ),
    "passes_on_second_answers": Mutation(
        "actors.dispatch",
        "        entry = self._entries.pop(query_id, None)\n",
        "        entry = self._entries.get(query_id)\n",
        "a query is answered at most once",
    ),
    "changes_the_store_though_superseded": Mutation(
        "persistence.writer",
        "            self._check_claim()\n            self.changes += 1\n",
        "            self.changes += 1\n",
        "one leader's writes are accepted per epoch",
        seed=43,
    ),
    "takes_over_too_early": Mutation(
        "core.leases",
        "OVER_S = 2.8",
        "OVER_S = 1.2",
        "a leader knows that its term is over before another takes over",
        seed=65,
    ),
    "obeys_leaders_of_before": Mutation(
        "core.leases",
        "        if 0 < epoch < self.epoch:\n",
        "        if False:\n",
        "nobody obeys an earlier epoch after a later one",
        seed=1369,
    ),
    "forgets_what_is_on_hosts_that_are_back": Mutation(
        "core.hosts",
        "            if was_lost and backend.is_at(name):\n",
        "            if False:\n",
        "after a heal there are just the replicas that are wanted",
        seed=307,
    ),
    "leaves_replicas_of_hosts_that_are_back": Mutation(
        "actors.members",
        "            if address and self._cluster.backend_of",
        "            if False and self._cluster.backend_of",
        "after a heal there are just the replicas that are wanted",
        seed=116,
    ),
    "does_not_see_replicas_die": Mutation(
        "actors.proxy",
        "self.loop.watch_process(process, gone, replica.address)",
        "self.loop.watch_process(process, lambda: None, replica.address)",
        "every query is answered",
    ),
}


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with its mutation, past all caches."""

    mutation: Mutation

    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_source(fullname) or ""
        found = source.count(self.mutation.old)
        if found != 1:
            raise ImportError(f"{fullname} has {found} times, not once: {self.mutation.old!r}")
        return compile(source.replace(self.mutation.old, self.mutation.new), fullname, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation
        self._name = f"greenroom.{mutation.module}"
        self._finding = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        del path, target
        if fullname != self._name or self._finding:
            return None
        self._finding = True
        spec = importlib.util.find_spec(fullname)
        self._finding = False
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
            spec.loader.mutation = self._mutation
        return spec


def install(name: str) -> None:
    """Have a module broken when it is imported; none of ours may be imported yet."""
    loaded = [module for module in sys.modules if module.startswith("greenroom.")]
    assert not loaded, f"too late: {loaded} are imported"
    sys.meta_path.insert(0, _Finder(MUTATIONS[name]))
