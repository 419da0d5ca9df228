"""A fuzzer guided by coverage: ``python -m tests.http.fuzz -max_total_time=60``; needs atheris.

Each input is what one client sends, whole and cut in two. By the short way and by ASGI the
front has to write the same bytes. Cut or not, it has to ask the same queries, though none behind a
request that it refused before it asked for its body by a 100. They are among the requests that a
plain reading of RFC 9112 finds, in their order: never two requests where it finds one. The cases
of doubtful.py are the first inputs. The options are libFuzzer's.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import atheris

from greenroom.actors.runtime.settings import read_settings
from greenroom.core.config import HTTPOptions
from greenroom.core.validation import validated
from tests.http import doubtful as cases
from tests.support.virtual_time import VirtualTimeLoop

with atheris.instrument_imports(include=["greenroom.http_front"]):
    from greenroom.http_front.app import Front
    from tests.http.fake_link import FakeLink
    from tests.http.wire import connected

MAX_BYTES = 1500
A_MOMENT_S = 0.001  # less than any time limit here
WORDS = [
    "\\x0d\\x0a",
    "\\x0d\\x0a\\x0d\\x0a",
    "0\\x0d\\x0a\\x0d\\x0a",
    "Content-Length: ",
    "Transfer-Encoding: chunked",
    "Connection: close",
    "Connection: upgrade",
    "Upgrade: websocket",
    "Expect: 100-continue",
    "Host: x",
    "GET /second HTTP/1.1",
    " HTTP/1.0",
]

_request_line = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([^ ]+) HTTP/1\.([01])").fullmatch
_header = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*(.*?)[ \t]*").fullmatch
_chunk_size = re.compile(rb"([0-9A-Fa-f]+)[ \t]*(?:;[^\r\n]*)?\r\n").match
_waits = re.compile(rb"100-continue", re.IGNORECASE).search
_changing = re.compile(rb"(date|x-request-id): [^\r]*").sub
_empty_lines = re.compile(rb"(?:\r\n)*").match


class Message(NamedTuple):
    method: bytes
    target: bytes
    body: bytes


class UnclearError(Exception):
    """The rest cannot be read, or not in one way only."""


def reading(data: bytes) -> Iterator[Message]:
    """Return the requests up to the first that is in doubt or not complete."""
    try:
        while data:
            message, data = first_message(data[_empty_lines(data).end() :])
            yield message
    except UnclearError:
        return


def first_message(data: bytes) -> tuple[Message, bytes]:
    head, end, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    request = _request_line(first)
    headers = [_header(line) for line in lines]
    if not (end and request and all(headers)) or re.search(rb"[\r\n\0]", b"".join([first, *lines])):
        raise UnclearError
    pairs = [(header[1].lower(), header[2]) for header in headers if header]
    lengths = [value for name, value in pairs if name == b"content-length"]
    codings = [value.lower() for name, value in pairs if name == b"transfer-encoding"]
    if codings:
        if codings != [b"chunked"] or lengths or request[3] == b"0":
            raise UnclearError
        body, rest = chunks(rest)
    else:
        if len(lengths) > 1 or not all(re.fullmatch(rb"[0-9]+", length) for length in lengths):
            raise UnclearError
        size = int(lengths[0]) if lengths else 0
        if len(rest) < size:
            raise UnclearError
        body, rest = rest[:size], rest[size:]
    return Message(request[1], request[2], body), rest


def chunks(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while size_line := _chunk_size(data):
        size, data = int(size_line[1], 16), data[size_line.end() :]
        if not size:
            trailers, end, rest = (b"\r\n" + data).partition(b"\r\n\r\n")
            if not end or not all(_header(line) for line in trailers.split(b"\r\n")[1:]):
                raise UnclearError
            return body, rest
        if data[size : size + 2] != b"\r\n":
            raise UnclearError
        body, data = body + data[:size], data[size + 2 :]
    raise UnclearError


class Fronts:
    """A front with the short way and one with ASGI's events, on a loop that stays.

    Its time stands still until all has been done that can be: however many requests there are, the
    longer way answers them all, and no clock of the machine's decides what comes too late.
    """

    def __init__(self, state_dir: Path) -> None:
        self._loop = VirtualTimeLoop()
        settings = read_settings({}, state_dir=state_dir)
        self._fronts = []
        for middlewares in ((), ("tests.support.middlewares:untouched",)):
            http = {**settings.http.model_dump(), "middlewares": middlewares}
            link = FakeLink()
            front = Front(settings.with_options(validated(HTTPOptions, http))[0], link)
            self._fronts.append((front, link))

    def check(self, data: bytes) -> None:
        """Raise if the front reads ``data`` in two ways, or in another than the RFC's."""
        cut = sum(data) % len(data) if data else 0
        first = None
        for pieces in ([data], [data[:cut], data[cut:]]):
            short, long = [self._run(front, link, pieces) for front, link in self._fronts]
            assert short == long, f"two ways of reading {pieces}:\n{short}\n{long}"
            first = first or short
            queries = first[1]
            if _waits(data):  # what is cut behind the head of a refused one ends the connection
                queries = queries[: len(short[1])]
            assert queries == short[1], f"other queries for {pieces}: {first[1]}, {short[1]}"
        found = reading(data)
        for asked in first[1]:
            if not any(asked == (message.method, message.body) for message in found):
                raise AssertionError(f"{asked} is no request of {data!r}")

    def _run(
        self, front: Front, link: FakeLink, pieces: list[bytes]
    ) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        return self._loop.run_until_complete(self._said(front, link, pieces))

    @staticmethod
    async def _said(
        front: Front, link: FakeLink, pieces: list[bytes]
    ) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        link.asked.clear()
        connection = connected(front)
        for piece in pieces:
            if piece and not connection.wire.closed:
                connection.say(piece)
                await asyncio.sleep(A_MOMENT_S)
        await connection.end()
        asked = [(each.http_method.encode(), each.call.body) for each in link.asked]
        return _changing(rb"\1: ", connection.wire.written), asked


def main() -> None:
    """Run libFuzzer, with the cases of the tests as its first inputs."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        whole = [request for request, _ in cases.READ_IN_ONE_WAY.values()]
        known = [*cases.REFUSED.values(), *cases.REFUSED_ALONE.values(), *whole]
        known += [cases.get() * 20, cases.EXPECTED_IN_VAIN]
        for number, request in enumerate(known):
            (corpus / str(number)).write_bytes(request + cases.SECOND)
        words = Path(folder, "words")
        words.write_text("".join(f'"{word}"\n' for word in WORDS))
        fronts = Fronts(Path(folder))
        for request in known:
            fronts.check(request + cases.SECOND)
        options = [f"-dict={words}", f"-max_len={MAX_BYTES}", "-timeout=20", str(corpus)]
        atheris.Setup([*sys.argv, *options], fronts.check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
