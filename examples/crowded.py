"""Two at a time, eight may wait, and who comes beyond that hears when to come back."""

import asyncio

from starlette.requests import Request

from greenroom import serve


@serve.deployment(
    max_ongoing_requests=2,
    max_queued_requests=8,
    request_timeout_s=5,
    retryable=True,  # POSTs too: the same job again does no harm
)
class Jobs:
    async def __call__(self, request: Request) -> dict[str, str]:
        await asyncio.sleep(0.2)
        return {"done": request.query_params.get("job", "")}


app = Jobs.bind()
