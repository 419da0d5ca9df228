"""A server of Mosec's, whose front is Rust: it answers with what it was sent, reversed."""

from __future__ import annotations

from typing import Any

from mosec import Server, Worker


class Reverse(Worker):
    def forward(self, data: Any) -> Any:
        return {"reversed": data["text"][::-1]}


if __name__ == "__main__":
    server = Server()
    server.append_worker(Reverse, num=1)
    server.run()
