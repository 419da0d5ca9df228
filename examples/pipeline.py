"""Two deployments, one calling the other: the tutorial's second version, which a canary tries."""

from starlette.requests import Request

from greenroom import serve
from greenroom.serve.handle import DeploymentHandle


@serve.deployment
class Tax:
    def __call__(self, net: float) -> float:
        return net * 0.19


@serve.deployment(num_replicas=2)
class Price:
    def __init__(self, tax: DeploymentHandle[float]) -> None:
        self.tax = tax

    async def __call__(self, request: Request) -> dict[str, float]:
        net = float(request.query_params["net"])
        return {"price": net + await self.tax.remote(net)}


app = Price.bind(Tax.bind())
