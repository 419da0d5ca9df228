"""What vLLM is to its clients, as far as tests need it: flags, health, chats and embeddings."""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a {curious} name"} 7.0 1700000000000
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    flags: dict[str, str]

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer({})
        elif self.path == "/metrics":
            self._answer(METRICS.encode(), kind="text/plain; version=0.0.4")
        elif self.path == "/v1/models":
            self._answer({"object": "list", "data": [_model(self.flags["--served-model-name"])]})
        else:
            self._answer({"error": {"message": "no such path"}}, 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [1.0, 2.0]}]
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            named = {"model": asked["model"], "object": "list"}
            self._answer({**named, "data": data, "usage": usage})
        elif self.path != "/v1/chat/completions":
            self._answer({"error": {"message": "no such path"}}, 404)
        elif asked.get("max_tokens", 1) > int(self.flags.get("--max-model-len", 100)):
            found = {"message": "max_tokens is too large", "type": "BadRequestError", "code": 400}
            self._answer({"error": found}, 400)
        elif asked.get("stream"):
            self._stream(asked)
        else:
            message = {"role": "assistant", "content": self._text(asked)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            self._answer({**_chat(asked, "chat.completion"), "choices": [choice], "usage": usage})

    def _text(self, asked: dict[str, Any]) -> str:
        said = asked["messages"][-1]["content"]
        return f"{self.flags['MODEL']} on {self.server.server_port}: {said}"

    def _stream(self, asked: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for word in self._text(asked).split():
            choice = {"index": 0, "delta": {"content": f"{word} "}, "finish_reason": None}
            chunk = {**_chat(asked, "chat.completion.chunk"), "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _answer(
        self, content: dict[str, Any] | bytes, status: int = 200, kind: str = "application/json"
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "vllm"}


def _chat(asked: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "c", "object": kind, "created": int(time.time()), "model": asked["model"]}


def main() -> None:
    serve, model, *words = sys.argv[1:]
    assert serve == "serve"
    flags = {"MODEL": model}
    while words:
        flag = words.pop(0)
        assert flag.startswith("--"), flag
        flags[flag] = words.pop(0) if words and not words[0].startswith("--") else "true"
    Handler.flags = flags
    sys.stderr.write(f"flags {json.dumps(flags)}\n")
    ThreadingHTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()


if __name__ == "__main__":
    main()
