"""A classifier behind FastAPI, whose pages document it: ``greenroom run examples.classifier:app``.

It needs ``pip install '.[examples]'``. POST ``{"sepal": [5.1, 3.5], "petal": [1.4, 0.2]}`` to
``/predict``; ``/docs`` has a form for it.
"""

from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, Field
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from greenroom import serve

Pair = Annotated[list[float], Field(min_length=2, max_length=2, description="length, width in cm")]
api = FastAPI(title="Irises")


class Flower(BaseModel):
    sepal: Pair
    petal: Pair


class Species(BaseModel):
    name: str
    probability: float


@serve.deployment
@serve.ingress(api)
class Classifier:
    def __init__(self) -> None:
        irises = load_iris()
        self.names = list(irises.target_names)
        self.model = LogisticRegression(max_iter=1000).fit(irises.data, irises.target)

    @api.post("/predict")
    def predict(self, flower: Flower) -> Species:
        chances = self.model.predict_proba([flower.sepal + flower.petal])[0]
        best = int(chances.argmax())
        return Species(name=self.names[best], probability=float(chances[best]))


app = Classifier.bind()
