"""A batched model as a LitServe API, or with `--tokens` a token stream; run with the port."""

import json
import os
import sys

import litserve
import numpy as np

WIDTH, TOKENS = 256, 200


class Model(litserve.LitAPI):
    def setup(self, device):
        self.weights = np.eye(WIDTH)

    def decode_request(self, request):
        return request

    def batch(self, inputs):
        return inputs

    def predict(self, inputs):
        if inputs[0]["name"] == "pid":
            return [{"pid": os.getpid()}] * len(inputs)
        values = np.array([each["value"] for each in inputs], dtype=float)
        rows = np.repeat(values[:, None], WIDTH, axis=1)
        results = (rows @ self.weights)[:, 0].tolist()
        return [{"name": each["name"], "value": r} for each, r in zip(inputs, results, strict=True)]

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return output


class Tokens(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request

    def predict(self, x):
        if x["name"] != "tokens":
            yield json.dumps(x)  # the echo, which shows that it serves
            return
        for _ in range(TOKENS):
            yield "token"

    def encode_response(self, output):
        yield from output


if __name__ == "__main__":
    if "--tokens" in sys.argv:
        api = Tokens(api_path="/tokens", stream=True)
    else:
        api = Model(api_path="/batching", max_batch_size=32, batch_timeout=0.005)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False)
