"""The FastAPI app of fastapi_app.py as a Greenroom deployment."""

from fastapi_app import api

from greenroom import serve

app = serve.deployment(serve.ingress(api)(type("Fast", (), {}))).bind()
