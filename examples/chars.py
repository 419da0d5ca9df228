"""A character model, trained when its replica starts, with continuous batching and OpenAI's API.

The model is an echo state network: a fixed random recurrent layer, whose hidden state is all that a
stream has to keep between two characters, and a readout by ridge regression.
"""

from collections.abc import AsyncIterator
from pydoc_data.topics import topics

import numpy as np

from greenroom import serve
from greenroom.serve.decorators.continuous import Stream
from greenroom.serve.protocols.openai import ChatRequest, Delta

TEXT = " ".join("".join(topics.values()).split())[:40_000]
SIZE, SHARPNESS = 512, 3.0


class CharModel:
    def __init__(self, text: str = TEXT, size: int = SIZE) -> None:
        random = np.random.default_rng(7)
        self.letters = sorted(set(text))
        self.index = {letter: number for number, letter in enumerate(self.letters)}
        recurrent = random.normal(size=(size, size)) / np.sqrt(size)
        self.recurrent = (0.9 * recurrent).astype(np.float32)
        self.embedding = random.normal(size=(len(self.letters), size)).astype(np.float32)
        numbers = [self.index[letter] for letter in text]
        hidden = np.zeros((len(numbers), size), np.float32)
        for at in range(1, len(numbers)):
            hidden[at] = self.advance(hidden[at - 1 : at], [numbers[at - 1]])[0]
        wanted = np.eye(len(self.letters), dtype=np.float32)[numbers]
        gram = hidden.T @ hidden + np.eye(size, dtype=np.float32)
        self.readout = np.linalg.solve(gram, hidden.T @ wanted)

    def advance(self, hidden: np.ndarray, letters: list[int]) -> np.ndarray:
        """Read one more letter with each hidden state: one row per stream."""
        return np.tanh(hidden @ self.recurrent + self.embedding[letters])

    def read(self, prompt: str) -> np.ndarray:
        hidden = np.zeros((1, self.recurrent.shape[0]), np.float32)
        for letter in prompt:
            hidden = self.advance(hidden, [self.index.get(letter, 0)])
        return hidden[0]

    def choose(self, hidden: np.ndarray) -> list[int]:
        """Draw the next letter of each stream."""
        chances = np.clip(hidden @ self.readout, 1e-3, None) ** SHARPNESS
        ends = np.cumsum(chances, axis=1)
        drawn = np.random.default_rng().random(len(hidden)) * ends[:, -1]
        return (ends < drawn[:, None]).sum(axis=1).tolist()


class Writing:
    """What a stream keeps between steps."""

    def __init__(self, hidden: np.ndarray, limit: int) -> None:
        self.hidden = hidden
        self.left = limit


@serve.deployment(max_ongoing_requests=200)
@serve.openai(models=["chars"])
class Chars:
    def __init__(self) -> None:
        self.model = CharModel()

    @serve.continuous_batch(max_size=32)
    def step(self, streams: list[Stream[tuple[str, int], str]]) -> None:
        for stream in streams:
            if stream.state is None:  # its first step
                prompt, limit = stream.item
                stream.state = Writing(self.model.read(prompt), limit)
        hidden = np.stack([stream.state.hidden for stream in streams])
        letters = self.model.choose(hidden)
        hidden = self.model.advance(hidden, letters)  # one multiplication for all streams
        for stream, letter, row in zip(streams, letters, hidden, strict=True):
            stream.put(self.model.letters[letter])
            stream.state.hidden = row
            stream.state.left -= 1
            if not stream.state.left:
                stream.end()

    async def chat(self, request: ChatRequest) -> AsyncIterator[str | Delta]:
        prompt = str(request.messages[-1].content)[-200:]
        limit = min(request.token_limit or 200, 2000)
        async for letter in self.step((prompt, limit)):
            yield letter
        yield Delta(finish_reason="length", prompt_tokens=len(prompt))


app = Chars.bind()
