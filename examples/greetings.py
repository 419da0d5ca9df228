"""Many models on one deployment, of which each replica keeps the three used last."""

import asyncio

from starlette.exceptions import HTTPException

from greenroom import serve

LANGUAGES = {"de": "Guten Tag", "en": "Good day", "fr": "Bonjour", "it": "Buongiorno"}


class Greeter:
    def __init__(self, words: str) -> None:
        self.words = words


@serve.deployment(num_replicas=2)
class Greeting:
    @serve.multiplexed(max_num_models_per_replica=3)
    async def model(self, language: str) -> Greeter:
        await asyncio.sleep(0.1)  # as long as it takes to load
        return Greeter(LANGUAGES[language])

    async def __call__(self) -> str:
        language = serve.get_multiplexed_model_id()
        if language not in LANGUAGES:
            raise HTTPException(404, f"no model for {language!r}; there are {', '.join(LANGUAGES)}")
        return (await self.model(language)).words


app = Greeting.bind()
