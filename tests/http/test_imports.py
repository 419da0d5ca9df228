"""What an HTTP worker imports before it serves: nothing that only operators need."""

from tests.support.programs import python


def test_a_worker_starts_without_the_admin_api() -> None:
    script = (
        "import sys, greenroom.http_front.server, greenroom.http_front.worker\n"
        "print(sorted(m for m in sys.modules if m.startswith('greenroom.serve')"
        " or m in {'greenroom.core.operations', 'greenroom.http_front.admin'}))"
    )
    assert python("-c", script) == "[]"
