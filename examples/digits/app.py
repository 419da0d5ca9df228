"""Reads handwritten digits, on two replicas: ``greenroom run examples.digits.app``.

It needs scikit-learn: ``pip install '.[examples]'``. POST an image as a JSON list of 64 numbers
from 0 to 16, and get ``{"digit": 3, "replica": 4711}``; ``python -m examples.digits.client`` does
so.
"""

import json
import os

import numpy as np
from sklearn.svm import SVC
from starlette.exceptions import HTTPException
from starlette.requests import Request

from examples.digits.images import split
from greenroom import serve

PIXELS = 64


@serve.deployment(num_replicas=2)
class Digits:
    def __init__(self) -> None:
        images, _, labels, _ = split()
        self.model = SVC(gamma=0.001).fit(images, labels)

    async def __call__(self, request: Request) -> dict[str, int]:
        image = read_image(await request.body())
        # Half a millisecond, so not worth a thread; a sync method would get one.
        return {"digit": int(self.model.predict([image])[0]), "replica": os.getpid()}


def read_image(body: bytes) -> np.ndarray:
    try:
        image = np.asarray(json.loads(body), dtype=float)
    except (TypeError, ValueError) as error:
        raise HTTPException(400, f"expected a JSON list of numbers: {error}") from None
    if image.shape != (PIXELS,):
        raise HTTPException(400, f"expected {PIXELS} numbers, got the shape {list(image.shape)}")
    return image


app = Digits.bind()
