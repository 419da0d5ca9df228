"""From definitions to records: the one way by which what was found valid is brought about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from greenroom.core.cluster.state import State
from greenroom.core.lifecycle.releases import folders_of
from greenroom.core.records import (
    APPLICATION,
    BACKEND,
    ENDPOINT,
    ApplicationRecord,
    BackendDefinition,
    BackendRecord,
    Definition,
    Definitions,
    EndpointRecord,
    Key,
    Release,
)
from greenroom.core.rollouts.rollouts import Rollouts

NO_CODE: Mapping[str, bytes] = MappingProxyType({})


def bring_about(
    state: State, rollouts: Rollouts, wanted: Definitions, code: Mapping[str, bytes] = NO_CODE
) -> bool:
    """Bring about definitions that have been found valid; return whether that changed anything.

    ``code`` has by its digest what may not be stored yet.
    """
    changed = [_define(state, rollouts, key, each, code) for key, each in wanted.items()]
    return any(changed)


def drop_endpoint(state: State, rollouts: Rollouts, name: str) -> None:
    """Remove an endpoint, and its rollout."""
    state.drop_endpoint(name)
    rollouts.forget(name)


def _define(
    state: State,
    rollouts: Rollouts,
    key: Key,
    wanted: Definition | None,
    code: Mapping[str, bytes],
) -> bool:
    kind, name = key
    if isinstance(wanted, BackendDefinition):
        return _define_backend(state, name, wanted, code)
    if state.definition(key) == wanted:
        return False
    if isinstance(wanted, EndpointRecord):
        state.put_endpoint(wanted)
    elif isinstance(wanted, ApplicationRecord):
        state.put_application(wanted)
    elif kind == ENDPOINT:
        drop_endpoint(state, rollouts, name)
    elif kind == APPLICATION:
        state.put_application(replace(state.applications[name], deleting=True))
    else:
        state.note(key)
        state.backends[name].delete()
        state.touch(name)
    return True


def _define_backend(
    state: State, tag: str, wanted: BackendDefinition, code: Mapping[str, bytes]
) -> bool:
    for folder in folders_of(wanted) & code.keys():
        state.keep_code(folder, code[folder])
    backend = state.backends.get(tag)
    content = code.get(wanted.code_digest)
    if backend is None:
        record = BackendRecord(
            tag=tag,
            releases=(Release(**wanted.release),),
            application=wanted.application,
            deployment=wanted.deployment,
        )
        state.add_backend(record, content)
        return True
    state.note((BACKEND, tag))
    changed = backend.deploy(**wanted.release)
    # Equal code may have come as other bytes; then what is stored already is kept.
    if content is not None and backend.record.newest.code_digest == wanted.code_digest:
        state.keep_code(wanted.code_digest, content)
    state.touch(tag)
    return changed
