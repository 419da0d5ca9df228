"""Three deployments that call each other: whole values, values on their way, and a stream."""

from collections.abc import AsyncIterator, Iterator

from starlette.requests import Request

from greenroom import serve

RHYMES = {"stage": ["age", "page", "cage"], "light": ["night", "might", "flight"]}


@serve.deployment
class Words:
    async def last(self, text: str) -> str:
        return text.rpartition(" ")[2]


@serve.deployment
class Rhymes:
    def of(self, word: str) -> Iterator[str]:
        yield from RHYMES.get(word, [])


@serve.deployment
class Stories:
    def __init__(self, words, rhymes) -> None:
        self.words = words
        self.rhymes = rhymes.options(stream=True)

    async def __call__(self, request: Request) -> AsyncIterator[str]:
        words = [self.words.last.remote(line) for line in request.query_params.getlist("line")]
        for word in words:  # all calls are under way
            async for rhyme in self.rhymes.of.remote(word):  # the word itself need not be here yet
                yield f"{await word}: {rhyme}\n"


app = Stories.bind(Words.bind(), Rhymes.bind())
