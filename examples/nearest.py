"""One numpy operation for many requests at a time, which look for the nearest city."""

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request

from greenroom import serve

CITIES = {"London": (51.5, -0.1), "Berlin": (52.5, 13.4), "Barcelona": (41.4, 2.2)}


@serve.deployment(user_config={"max_batch_size": 32})
class Nearest:
    def __init__(self, cities: dict[str, tuple[float, float]]) -> None:
        self.names = list(cities)
        self.places = np.array(list(cities.values()))

    def reconfigure(self, user_config: dict[str, int]) -> None:
        self.find.set_max_batch_size(user_config["max_batch_size"])

    @serve.batch(batch_wait_timeout_s=0.005)
    async def find(self, places: list[tuple[float, float]]) -> list[str]:
        away = np.array(places)[:, None, :] - self.places
        return [self.names[index] for index in (away**2).sum(axis=2).argmin(axis=1)]

    async def __call__(self, request: Request) -> str:
        try:
            north, east = map(float, request.query_params["at"].split(","))
        except (KeyError, ValueError):
            raise HTTPException(400, "expected ?at=<degrees north>,<degrees east>") from None
        return await self.find((north, east))  # called with one place, run with many


app = Nearest.bind(CITIES)
