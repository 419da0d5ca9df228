"""Where a store is, by its name: the path of a folder, or the URL of a database."""

from __future__ import annotations

import shutil
from pathlib import Path

from greenroom.persistence.filesystem import FileStore
from greenroom.persistence.kv import Standing, StoreLocation
from greenroom.persistence.layout import key_of

NAMESPACE = "controller"  # of its state
POSTGRES = ("postgresql://", "postgres://")


class FileLocation:
    """A StoreLocation in a folder."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self.folder = folder
        self._namespace = namespace

    def __str__(self) -> str:
        return str(self.folder)

    def open(self, *, after: int | None = None, lease: bytes | None = None) -> FileStore:
        """Become the writer; see StoreLocation and FileStore.open."""
        return FileStore.open(self.folder, namespace=self._namespace, after=after, lease=lease)

    def open_reader(self) -> FileStore:
        """Return the store for reading; see StoreLocation."""
        return FileStore.open(self.folder, namespace=self._namespace, read_only=True)

    def namespaces(self) -> list[str]:
        """Return the namespaces that have stores here; see StoreLocation."""
        folders = [path.name for path in self.folder.glob("*") if path.is_dir()]
        return sorted(filter(None, map(key_of, folders)))

    def beside(self, namespace: str) -> FileLocation:
        """Return where the store of another namespace is; see StoreLocation."""
        return FileLocation(self.folder, namespace)

    def look(self) -> Standing:
        """Return what the store says of its last writer; see StoreLocation."""
        return FileStore.look(self.folder, namespace=self._namespace)

    def forget(self) -> None:
        """Delete all that is saved; see StoreLocation."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def try_to_write(self) -> None:
        """Raise NothingSavedError unless the folder can be written; see StoreLocation."""
        FileStore.try_to_write(self.folder, namespace=self._namespace)


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
