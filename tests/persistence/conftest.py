from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer


@pytest.fixture(scope="package")
def postgres() -> Iterator[PostgresServer]:
    """A database server that runs; a test that stops it starts it again."""
    from tests.support.postgres import postgres_server  # noqa: PLC0415  # psycopg may be missing

    with postgres_server() as server:
        server.start()
        server.wait()
        yield server
