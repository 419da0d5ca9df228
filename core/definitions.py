"""What clients ask for, apart from how far it has come: the part of the state that changes are of.

A backend's, an endpoint's or an application's *definition* is what the last change made it, None
where there is none. A deploy says which definitions there should be; a plan compares those with
what is; history keeps those before and after each change; and an undo asks for those before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from greenroom.core.config import config_shown
from greenroom.core.records import ApplicationRecord, BackendRecord, EndpointRecord

BACKEND, ENDPOINT, APPLICATION = KINDS = ("backend", "endpoint", "application")

Key = tuple[str, str]
"""Kind and name."""


@dataclass(frozen=True, kw_only=True)
class BackendDefinition:
    """The code and settings that a backend should run."""

    code_hash: str
    code_digest: str
    config: Mapping[str, Any]
    actor_options: Mapping[str, Any]
    version: str | None = None
    application: str = ""
    deployment: str = ""

    @property
    def release(self) -> dict[str, Any]:
        """The part that replicas run."""
        return {
            "code_hash": self.code_hash,
            "code_digest": self.code_digest,
            "config": self.config,
            "actor_options": self.actor_options,
            "version": self.version,
        }


Definition = BackendDefinition | EndpointRecord | ApplicationRecord
Definitions = Mapping[Key, Definition | None]


def backend_definition(record: BackendRecord) -> BackendDefinition | None:
    """Return what a backend should run; None for one that is being deleted."""
    if record.deleting:
        return None
    fields = (field.name for field in dataclasses.fields(BackendDefinition))
    return BackendDefinition(**{name: getattr(record, name) for name in fields})


def differences(before: Definition | None, after: Definition | None) -> dict[str, Any]:
    """Return field -> [before, after] of what differs, as plain values for people and programs.

    Of settings (``config.num_replicas``) each one counts by itself.
    """
    old, new = _plain(before), _plain(after)
    names = [*new, *(name for name in old if name not in new)]
    return {
        name: [old.get(name), new.get(name)] for name in names if old.get(name) != new.get(name)
    }


def _plain(definition: Definition | None) -> dict[str, Any]:
    if definition is None:
        return {}
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(definition):
        value = getattr(definition, field.name)
        if field.name == "config":
            plain |= config_shown(value)
        elif field.name == "actor_options":
            plain |= {f"actor_options.{name}": part for name, part in value.items()}
        elif field.name not in {"name", "code_digest", "deleting"}:
            plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain
