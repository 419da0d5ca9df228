"""The echo as a Mosec worker; run with `--address` and `--port`. Mosec takes nothing but POST."""

import os

from mosec import Server, Worker


class Echo(Worker):
    def forward(self, data):
        return {"pid": os.getpid()} if data["name"] == "pid" else data


if __name__ == "__main__":
    server = Server()
    server.append_worker(Echo, num=1, route="/echo")
    server.run()
