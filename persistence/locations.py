"""Where a store is, by its name: the path of a folder, or the URL of a database."""

from __future__ import annotations

from pathlib import Path

from greenroom.persistence.filesystem import FileLocation
from greenroom.persistence.kv import StoreLocation

NAMESPACE = "controller"  # of its state
POSTGRES = ("postgresql://", "postgres://")


def is_database(name: str) -> bool:
    """Return whether a store's name is the URL of a database rather than a path."""
    return "://" in name


def location_at(name: str | Path, namespace: str = NAMESPACE) -> StoreLocation:
    """Return where the store of this name is; ValueError where that cannot be one.

    It connects to nothing and opens nothing. Each namespace there is a store of its own.
    """
    if isinstance(name, Path) or not is_database(name):
        return FileLocation(Path(name).absolute(), namespace)
    if not name.startswith(POSTGRES):
        raise ValueError(
            f"{name.partition('://')[0]}://...: must be the path of a folder, or "
            "postgresql://USER@HOST/DATABASE"
        )
    # Most systems have no database, and never import its driver.
    from greenroom.persistence.postgres import PostgresLocation  # noqa: PLC0415

    return PostgresLocation(name, namespace)
