"""Tests that may be looked at after every query, as often as one likes, and mean the same.

An ordinary significance test that is repeated as data come in finds a difference sooner or later
where there is none. These are *e-processes*: the capital of a gambler who bets against the
hypothesis, beginning with 1, at odds that the hypothesis itself makes fair. If it is true, the
chance that the capital ever reaches 1/alpha is at most alpha, whenever one looks and whenever one
stops (Ville, "Étude critique de la notion de collectif", 1939). So the capital is the evidence.

:func:`increase` compares two backends that queries are drawn for by chance. With a share w of the
queries for the new one, a bad query counts 1/w if it was the new one's, -1/(1-w) if it was the old
ones', any other 0: a number whose mean is the difference of the two chances, whatever either is at
that moment. The bet on the mean of such bounded numbers is that of Waudby-Smith and Ramdas
("Estimating means of bounded random variables by betting", Journal of the Royal Statistical Society
B 86, 2024). Without a margin it is a likelihood ratio for which backend a bad query was drawn for,
as in Lindon and Malek ("Anytime-valid inference for multinomial count data", NeurIPS 2022), whose
use for canaries Lindon, Sanden and Shirikian describe ("Rapid regression detection in software
deployments through sequential testing", KDD 2022). Only chance parts the two backends' queries, so
nothing is assumed about them: load and errors may change with the hour, the two share all of that.

:func:`excess` compares one backend with a limit: Wald's sequential likelihood ratio ("Sequential
tests of statistical hypotheses", Annals of Mathematical Statistics 16, 1945).

How much to bet depends on how large the difference is, which nobody knows. So the capital is spread
evenly over stakes of all sizes; their mean is an e-process again (a mixture, as in Robbins,
"Statistical methods related to the law of the iterated logarithm", Annals of Mathematical
Statistics 41, 1970). That costs at most a factor of :data:`STAKES` of the best one's.
"""

from __future__ import annotations

from functools import lru_cache
from math import exp, log, log1p

STAKES = 12
_STAKE_SIZES = tuple(0.9 * 2.0**-k for k in range(STAKES))  # of the largest that cannot ruin
_MAX_EXPONENT = 700.0  # exp() of more overflows

Logs = tuple[tuple[float, ...], ...]


def increase(new_bad: int, old_bad: int, queries: int, share: float, margin: float = 0.0) -> float:
    """Return the evidence that queries go bad more often with the new backend than with the old.

    More often by more than ``margin``, that is; ``queries`` are those of both, bad or not, and
    ``share`` the chance of each to be drawn for the new one, above 0 and below 1.
    """
    return _capital(_increase_logs(share, margin), (new_bad, old_bad, queries - new_bad - old_bad))


def excess(bad: int, queries: int, limit: float) -> float:
    """Return the evidence that queries go bad more often than ``limit``, above 0 and below 1."""
    return _capital(_excess_logs(limit), (bad, queries - bad))


def _capital(logs: Logs, counts: tuple[int, ...]) -> float:
    total = 0.0
    for stake in logs:
        exponent = sum(n * gain for n, gain in zip(counts, stake, strict=True))
        total += exp(min(exponent, _MAX_EXPONENT))
    return total / len(logs)


@lru_cache(maxsize=1024)
def _increase_logs(share: float, margin: float) -> Logs:
    worst = 1 / (1 - share) + margin  # what an old backend's bad query loses, per unit staked
    return tuple(
        (
            log1p(size / worst * (1 / share - margin)),
            log1p(-size),
            log1p(-size / worst * margin),
        )
        for size in _STAKE_SIZES
    )


@lru_cache(maxsize=1024)
def _excess_logs(limit: float) -> Logs:
    supposed = [limit + (1 - limit) * size for size in _STAKE_SIZES]
    return tuple((log(p / limit), log((1 - p) / (1 - limit))) for p in supposed)
