"""The echo as a LitServe API. LitServe routes nothing but POST to user code."""

import os
import sys

import litserve


class Echo(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request

    def predict(self, x):
        return {"pid": os.getpid()} if x["name"] == "pid" else x

    def encode_response(self, output):
        return output


if __name__ == "__main__":
    server = litserve.LitServer(
        Echo(api_path="/echo"),
        accelerator="cpu",
        workers_per_device=1,
        restart_workers="--restart-workers" in sys.argv,
    )
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False)
