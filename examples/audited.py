"""A deployment whose logs are JSON, each line with its request: see docs/logging.md."""

import logging

from starlette.requests import Request

from greenroom import serve

logger = logging.getLogger(__name__)


@serve.deployment(version="3", logging_config={"encoding": "JSON"})
class Audited:
    async def __call__(self, request: Request) -> dict[str, str]:
        item = request.query_params.get("item", "tea")
        logger.info("sold %s", item, extra={"item": item})
        return {"sold": item, "request": serve.get_request_context().request_id}


app = Audited.bind()
