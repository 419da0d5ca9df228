"""The echo as a Ray Serve deployment; a script, because `serve run` has no option for the port."""

import os
import sys

import ray
from ray import serve


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class Echo:
    async def __call__(self, request):
        if request.method == "GET":
            return {"pid": os.getpid()}
        return await request.json()


if __name__ == "__main__":
    ray.init(include_dashboard=False, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Echo.bind(), blocking=True)
