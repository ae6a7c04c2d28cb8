"""The statistics of acceptance: how likely is a cached answer wrong, given the similarity of the two questions?

In the spirit of vCache (arXiv 2502.03771), which fits a logistic curve ``P(right | s) = 1 / (1 + exp(-gamma (s - t)))`` to each
cached question's own verified outcomes and takes a confidence bound of its parameters. Most questions of a real cache are met a
few times only, and a curve of one's own fitted to three outcomes bounds nothing. So the curve here has two levels:

* the *pool*: one logistic curve through all outcomes, ``P(right | s) = (1 - lapse) logistic(a + b s)``. The lapse is what no
  similarity tells, the errors that remain between questions that look alike; without it a logistic curve promises, by
  extrapolation, errors that nobody has counted. It is averaged over what the outcomes leave possible; a and b are taken at
  their lower confidence limits;
* the *entry*: its own shift ``u`` of the logit, normal around 0 in the population with a spread that is estimated too. An entry's
  outcomes turn that prior into its posterior: an entry without outcomes is as good as the population, one with many as its own.

vCache's bound is the best of ``(1 - epsilon) L(s, parameters at confidence 1 - epsilon)`` over epsilon, which is at most the
probability under the parameters' posterior; it is taken here in the same way for the pool's parameters, while the shift is
integrated over.

Everything is pure and numpy alone. Similarities are binned to 1/512, so that a fit costs the same after a million outcomes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BINS = 513
"""Similarities 0, 1/512, ..., 1; what is below 0 counts as 0."""

EPSILONS = (0.02, 0.004, 0.0008, 0.00016)
_QUANTILES = (2.0537, 2.6521, 3.1559, 3.5985)
"""Of the normal distribution, at 1 - epsilon."""

_LAPSES = np.array([0.0, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16])
_SPREADS = np.array([0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0])
# weakly informative: even odds at 0.9, give or take what any embedding model may do; in units of (similarity - 0.9) x 10
_PRIOR_MEAN = np.array([0.0, 1.5])
_PRIOR_PRECISION = np.array([1 / 2.0**2, 1 / 1.0**2])
_SPREAD_PRIOR = (0.0, 0.7)
"""Mean and standard deviation of the logarithm of the spread."""

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(7)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
_SHIFTS = np.linspace(-4.0, 4.0, 33)
"""Grid of an entry's shift, in spreads."""

_X = (np.arange(BINS) / (BINS - 1) - 0.9) * 10.0
_DESIGN = np.stack([np.ones(BINS), _X], axis=1)


def bin_of(similarity: float) -> int:
    """Return the bin of a similarity: rounded down, so that no question counts as more alike than it is."""
    return min(max(int(similarity * (BINS - 1) + 1e-9), 0), BINS - 1)


@dataclass(frozen=True, slots=True)
class PoolModel:
    """What is known of the population.

    Attributes:
        lapse: Expected share of wrong answers that no similarity tells, 0..1.
        spread: Standard deviation of the entries' shifts, in logits.
        central: The population's conditional logit by bin, shape (BINS,): of an entry with shift 0.
        limits: Its lower confidence limits, per level of :data:`EPSILONS` one value per bin.
    """

    lapse: float
    spread: float
    central: Floats
    limits: tuple[tuple[float, ...], ...]

    def wrong(self, place: int, mean: float, deviation: float) -> float:
        """Return an upper bound of the probability that an answer is wrong. A few microseconds, whatever has been observed.

        Args:
            place: Bin of the similarity.
            mean: Posterior mean of the entry's shift; 0 for an entry without outcomes.
            deviation: Its standard deviation; ``spread`` for an entry without outcomes.
        """
        scaled = min(deviation * _PER_DEVIATION, _DEVIATIONS - 1.001)
        row = int(scaled)
        across = scaled - row
        best = 0.0
        for epsilon, limit in zip(EPSILONS, self.limits, strict=True):
            scaled = min(max((limit[place] + mean + _REACH) * _PER_LOGIT, 0.0), _LOGITS - 1.001)
            column = int(scaled)
            along = scaled - column
            at = row * _LOGITS + column
            below, above = _AVERAGED[at], _AVERAGED[at + _LOGITS]
            below += along * (_AVERAGED[at + 1] - below)
            above += along * (_AVERAGED[at + _LOGITS + 1] - above)
            best = max(best, (1.0 - epsilon) / (1.0 + math.exp(-below - across * (above - below))))
        return 1.0 - (1.0 - self.lapse) * best


def fit_pool(right: Floats, wrong: Floats, bins: npt.NDArray[np.int16], weights: npt.NDArray[np.float32]) -> PoolModel:
    """Fit the population's curve, lapse and spread.

    Args:
        right: Number of right outcomes by bin, shape (BINS,); weights, so any value >= 0.
        wrong: Of wrong ones.
        bins: Outcomes of a sample of entries, shape (entries, outcomes): their bins.
        weights: Their weights: > 0 right, < 0 wrong, 0 none.
    """
    parameters, covariance, evidence = _curves(right, wrong)
    belief = np.exp(evidence - evidence.max())
    belief /= belief.sum()
    lapse = float(belief @ _LAPSES)
    linear = parameters @ _DESIGN.T
    error = np.sqrt(np.einsum("bi,lij,bj->lb", _DESIGN, covariance, _DESIGN))
    # the more alike, the more often right: so a limit that holds here holds for all that are more alike
    levels = [np.maximum.accumulate(linear - quantile * error, axis=1) for quantile in (0.0, *_QUANTILES)]
    shares = [(belief * (1.0 - _LAPSES)) @ _logistic(level) / (1.0 - lapse) for level in levels]
    marginal = [_logit(share) for share in shares]
    spread = _spread(marginal[0], lapse, bins, weights)
    central, *limits = (_conditional(curve, spread) for curve in marginal)
    return PoolModel(lapse, spread, central, tuple(tuple(limit.tolist()) for limit in limits))


def fit_entries(model: PoolModel, bins: npt.NDArray[np.int16], weights: npt.NDArray[np.float32]) -> tuple[Floats, Floats]:
    """Return the posterior mean and standard deviation of each entry's shift, shapes (entries,).

    Args:
        model: The population.
        bins: Outcomes per entry, shape (entries, outcomes): their bins.
        weights: Their weights: > 0 right, < 0 wrong, 0 none.
    """
    likelihood = _likelihood(model.central, model.spread, model.lapse, bins, weights)
    posterior = likelihood - _SHIFTS**2 / 2
    posterior = np.exp(posterior - posterior.max(axis=1, keepdims=True))
    posterior /= posterior.sum(axis=1, keepdims=True)
    mean = posterior @ _SHIFTS
    variance = posterior @ _SHIFTS**2 - mean**2
    return model.spread * mean, model.spread * np.sqrt(np.maximum(variance, 0.0))


def _curves(right: Floats, wrong: Floats) -> tuple[Floats, Floats, Floats]:
    """Posterior mode (L, 2) and covariance (L, 2, 2) of the curve for each lapse, and the log evidence of the lapse (L,)."""
    used = np.flatnonzero(right + wrong)
    design, right, wrong = _DESIGN[used], right[used], wrong[used]
    ceiling = 1.0 - _LAPSES[:, None]

    def log_posterior(parameters: Floats) -> Floats:
        share = ceiling * _logistic(parameters @ design.T)
        prior = ((parameters - _PRIOR_MEAN) ** 2 * _PRIOR_PRECISION).sum(axis=1) / 2
        fit: Floats = np.log(np.maximum(share, 1e-300)) @ right + np.log(np.maximum(1.0 - share, 1e-300)) @ wrong - prior
        return fit

    parameters = np.tile(_PRIOR_MEAN, (len(_LAPSES), 1))
    score = log_posterior(parameters)
    for _ in range(30):  # Fisher scoring; a step that does not improve is halved
        gradient, information = _derivatives(parameters, ceiling, design, right, wrong)
        step = np.linalg.solve(information, gradient[..., None])[..., 0]
        size = np.ones(len(_LAPSES))
        for _ in range(12):
            trial = parameters + size[:, None] * step
            # a slope below 0 would say that the less alike are the more often right
            trial[:, 1] = np.maximum(trial[:, 1], 0.05)
            found = log_posterior(trial)
            worse = found < score - 1e-9
            if not worse.any():
                break
            size[worse] /= 2
        better = found > score
        gained = (found - score)[better].max(initial=0.0)
        parameters, score = np.where(better[:, None], trial, parameters), np.where(better, found, score)
        if gained < 1e-6:
            break
    _, information = _derivatives(parameters, ceiling, design, right, wrong)
    covariance = np.asarray(np.linalg.inv(information), np.float64)
    evidence = score - np.asarray(np.linalg.slogdet(information)[1], np.float64) / 2
    return parameters, covariance, evidence


def _derivatives(parameters: Floats, ceiling: Floats, design: Floats, right: Floats, wrong: Floats) -> tuple[Floats, Floats]:
    """Gradient (L, 2) and Fisher information (L, 2, 2) of the log posterior."""
    logistic = _logistic(parameters @ design.T)
    share = ceiling * logistic
    slope = share * (1.0 - logistic)
    rest = np.maximum(1.0 - share, 1e-12)
    per_bin = right * (1.0 - logistic) - wrong * slope / rest
    gradient = per_bin @ design - (parameters - _PRIOR_MEAN) * _PRIOR_PRECISION
    weight = (right + wrong) * slope**2 / np.maximum(share * rest, 1e-12)
    information = np.einsum("lb,bi,bj->lij", weight, design, design) + np.diag(_PRIOR_PRECISION)
    return gradient, information


def _spread(marginal: Floats, lapse: float, bins: npt.NDArray[np.int16], weights: npt.NDArray[np.float32]) -> float:
    """The spread under which the entries' own outcomes are most likely, its prior included."""
    scores = -((np.log(_SPREADS) - _SPREAD_PRIOR[0]) ** 2) / (2 * _SPREAD_PRIOR[1] ** 2)
    prior = np.exp(-(_SHIFTS**2) / 2)
    prior /= prior.sum()
    # one outcome tells nothing of how entries differ
    several = np.count_nonzero(weights, axis=1) > 1
    bins, weights = bins[several], weights[several]
    for place, spread in enumerate(_SPREADS):
        likelihood = _likelihood(_conditional(marginal, spread), spread, lapse, bins, weights)
        best = likelihood.max(axis=1, keepdims=True)
        scores[place] += (best[:, 0] + np.log(np.exp(likelihood - best) @ prior)).sum()
    return float(_SPREADS[np.argmax(scores)])


def _likelihood(
    central: Floats, spread: float, lapse: float, bins: npt.NDArray[np.int16], weights: npt.NDArray[np.float32]
) -> Floats:
    """Log likelihood of each entry's outcomes by shift, shape (entries, shifts)."""
    share = (1.0 - lapse) * _logistic(central[:, None] + spread * _SHIFTS)
    hit, miss = np.log(np.maximum(share, 1e-300)), np.log(np.maximum(1.0 - share, 1e-12))
    total = np.zeros((len(bins), len(_SHIFTS)))
    row, column = np.nonzero(weights)
    if not len(row):
        return total
    place, weight = bins[row, column], weights[row, column]
    told = np.abs(weight)[:, None] * np.where((weight > 0)[:, None], hit[place], miss[place])
    first = np.flatnonzero(np.diff(row, prepend=-1))
    total[row[first]] = np.add.reduceat(told, first, axis=0)
    return total


def _conditional(marginal: Floats, spread: float) -> Floats:
    """The logit at shift 0 for which the average over all shifts is the marginal logit."""
    inner = np.linspace(-30.0, 30.0, 601)
    outer = _logit(_logistic(inner[:, None] + spread * _NODES) @ _WEIGHTS)
    found: Floats = np.interp(marginal, outer, inner)
    return found


def _logistic(value: Floats) -> Floats:
    result: Floats = 1.0 / (1.0 + np.exp(np.minimum(-value, 700.0)))
    return result


def _logit(share: Floats) -> Floats:
    share = np.clip(share, 1e-12, 1.0 - 1e-12)
    result: Floats = np.log(share) - np.log1p(-share)
    return result


_REACH, _PER_LOGIT, _LOGITS = 30.0, 4, 241
_PER_DEVIATION, _DEVIATIONS = 8, 33


def _average() -> list[float]:
    """The logit of the logistic averaged over normal shifts, by deviation (rows) and middle: integrated here, not per request."""
    middles = np.arange(_LOGITS) / _PER_LOGIT - _REACH
    deviations = np.arange(_DEVIATIONS) / _PER_DEVIATION
    averaged = _logit(_logistic(middles[:, None] + deviations[:, None, None] * _NODES) @ _WEIGHTS)
    flat: list[float] = averaged.ravel().tolist()
    return flat


_AVERAGED = _average()
