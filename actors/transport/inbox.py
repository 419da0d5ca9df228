"""What has arrived and waits for its handler.

Theory of operation. Handlers may take long, and the loop must meanwhile write what they send and
hear who answers: so it gets its turn after ``SLICE_S``, and the rest is handled after that. But
while the loop reads, more arrives. What is read is acknowledged, and only what is not acknowledged
holds its sender back; so what waits beyond ``MAX_WAITING_BYTES`` is handled first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import monotonic

from greenroom.actors.transport.envelopes import Envelope

SLICE_S = 0.005
MAX_WAITING_BYTES = 1024 * 1024


class Inbox:
    """Envelopes in the order of their arrival; true when there are any."""

    def __init__(self) -> None:
        self._envelopes: deque[Envelope] = deque()
        self._bytes = 0  # of those that wait

    def __len__(self) -> int:
        return len(self._envelopes)

    def __iter__(self) -> Iterator[Envelope]:
        return iter(self._envelopes)

    def put(self, envelope: Envelope) -> None:
        """Add one."""
        self._envelopes.append(envelope)
        self._bytes += envelope.size

    def put_first(self, envelope: Envelope) -> None:
        """Add one that all others wait for."""
        self._envelopes.appendleft(envelope)
        self._bytes += envelope.size

    def take(self) -> Envelope:
        """Remove the first; IndexError when there is none."""
        envelope = self._envelopes.popleft()
        self._bytes -= envelope.size
        return envelope

    def take_slice(self) -> Iterator[Envelope]:
        """Remove and yield what is to be handled before the loop gets its turn."""
        ends_at = monotonic() + SLICE_S
        for _ in range(len(self._envelopes)):
            yield self.take()
            if monotonic() > ends_at and self._bytes < MAX_WAITING_BYTES:
                return
