from collections.abc import Iterator

import pytest

from tests.support.postgres import PostgresServer, postgres_server


@pytest.fixture(scope="package")
def postgres() -> Iterator[PostgresServer]:
    """A database server that runs; a test that stops it starts it again."""
    with postgres_server() as server:
        server.start()
        server.wait()
        yield server
