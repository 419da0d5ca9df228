"""The echo as a FastAPI app: for uvicorn as it is, for Greenroom as a deployment's app."""

import os

from fastapi import FastAPI
from pydantic import BaseModel

api = FastAPI()


class Item(BaseModel):
    name: str
    value: int


@api.get("/echo")
async def pid() -> dict[str, int]:
    return {"pid": os.getpid()}


@api.post("/echo")
async def echo(item: Item) -> Item:
    return item
