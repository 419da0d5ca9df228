"""Posts every held-out image to the digits example and prints how many were read right.

``python -m examples.digits.client [URL]``; the exit code is 0 if the accuracy is above 0.9.
"""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from examples.digits.images import split

CONNECTIONS = 8
GOOD = 0.9


def read_digit(url: str, image: list[float]) -> dict[str, int]:
    request = urllib.request.Request(
        url, json.dumps(image).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        answer: dict[str, int] = json.load(response)
        return answer


def main(url: str = "http://127.0.0.1:8000/") -> int:
    _, images, _, labels = split()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        answers = list(pool.map(lambda image: read_digit(url, image), images.tolist()))
    right = sum(
        answer["digit"] == label for answer, label in zip(answers, labels.tolist(), strict=True)
    )
    accuracy = right / len(answers)
    replicas = {answer["replica"] for answer in answers}
    print(f"accuracy {accuracy:.3f}: {right} of {len(answers)} images, {len(replicas)} replicas")
    return 0 if accuracy > GOOD else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
