"""Which endpoint a path belongs to: the one with the longest route that covers it."""

from __future__ import annotations


class Routes:
    """Route prefixes, each of one endpoint. ``/a`` covers ``/a`` and ``/a/...``, not ``/ab``."""

    def __init__(self) -> None:
        self._endpoints: dict[str, str] = {}
        self._depth = 1  # the most segments that any route has had

    def set(self, prefix: str, endpoint: str) -> None:
        """Give a route to an endpoint."""
        self._endpoints[prefix] = endpoint
        self._depth = max(self._depth, prefix.count("/"))

    def remove(self, prefix: str, endpoint: str) -> None:
        """Take a route from an endpoint, unless another one has it by now."""
        if self._endpoints.get(prefix) == endpoint:
            del self._endpoints[prefix]

    def find(self, path: str) -> str | None:
        """Return the endpoint for a path; takes as long for a thousand routes as for one."""
        endpoints = self._endpoints
        if (exact := endpoints.get(path)) is not None:
            return exact
        # No longer than the deepest route: a path of a thousand slashes must not cost more.
        segments = path.split("/", self._depth + 1)[: self._depth + 1]
        while len(segments) > 1:
            if (found := endpoints.get("/".join(segments))) is not None:
                return found
            segments.pop()
        return endpoints.get("/")

    def all(self) -> dict[str, str]:
        """Return prefix -> endpoint, sorted."""
        return dict(sorted(self._endpoints.items()))
