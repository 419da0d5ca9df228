"""A batched model and a token stream as Mosec workers; run with `--address` and `--port`."""

import os

import numpy as np
from mosec import Server, SSEWorker, Worker

WIDTH, TOKENS = 256, 200


class Model(Worker):
    def __init__(self):
        self.weights = np.eye(WIDTH)

    def forward(self, data):
        if data[0]["name"] == "pid":
            return [{"pid": os.getpid()}] * len(data)
        values = np.array([each["value"] for each in data], dtype=float)
        rows = np.repeat(values[:, None], WIDTH, axis=1)
        results = (rows @ self.weights)[:, 0].tolist()
        return [{"name": each["name"], "value": r} for each, r in zip(data, results, strict=True)]


class Tokens(SSEWorker):
    def forward(self, data):
        for _ in range(TOKENS):
            self.send_stream_event("token")
        return data


if __name__ == "__main__":
    server = Server()
    server.append_worker(Model, num=1, max_batch_size=32, max_wait_time=5, route="/batching")
    server.append_worker(Tokens, num=1, route="/tokens")
    server.run()
