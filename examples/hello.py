"""The README's example: ``greenroom run examples.hello:app``.

Then ``curl 'http://127.0.0.1:8000/?name=Ada'``.
"""

from starlette.requests import Request

from greenroom import serve


@serve.deployment
class Hello:
    def __init__(self, greeting: str) -> None:
        self.greeting = greeting

    async def __call__(self, request: Request) -> dict[str, str]:
        return {"message": f"{self.greeting}, {request.query_params.get('name', 'world')}!"}


app = Hello.bind("Hello")
