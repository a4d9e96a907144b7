"""Forecasts traffic of the next minutes from that of the last hours. The method that back-tests best is used.

Methods: `last` (reactive: as now), seasonal naive, Holt-Winters and ARIMA; the latter two are statsmodels', without
which they are left out. A method has to beat `last` clearly on the history, or `last` is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from halfmoon.policy.models.latency import Floats

_LEAST_BINS = 12  # of history for anything but `last`
_LEAST_SEASON, _MOST_SEASON = 3, 1440  # bins
_CORRELATED = 0.3  # autocorrelation from which a season is believed
_NUM_ORIGINS = 6  # of back-tests
_LEAST_GAIN = 0.9  # of the error of `last`, for a method to be used
_FITTED_BINS = 400  # latest ones that a model is fitted to

Method = Callable[[Floats, int, int], Floats]
"""(history [n], season in bins or 0, horizon) -> values [horizon]."""


class Forecast(NamedTuple):
    """The next bins, and how far off the method was on the history."""

    values: Floats  # [horizon]
    method: str
    error: float  # mean absolute error of the back-tests over the mean value


def forecast(history: Floats, horizon: int) -> Forecast:
    """Forecasts `horizon` bins behind the history of equal bins; values are not negative."""
    methods = available_methods()
    season = season_of(history)
    if len(history) < max(_LEAST_BINS, 2 * horizon):
        return Forecast(_last(history, 0, horizon), "last", 0.0)
    errors = {name: back_test(history, season, horizon, method) for name, method in methods.items()}
    best = min(errors, key=lambda name: errors[name])
    if not errors[best] < _LEAST_GAIN * errors["last"]:
        best = "last"
    values = np.maximum(methods[best](history, season, horizon), 0.0)
    return Forecast(values, best, errors[best])


def available_methods() -> Mapping[str, Method]:
    """The methods by name; those of statsmodels only where it is installed."""
    methods: dict[str, Method] = {"last": _last, "seasonal-naive": _seasonal_naive}
    if find_spec("statsmodels") is not None:
        methods |= {"holt-winters": _holt_winters, "arima": _arima}
    return methods


def back_test(history: Floats, season: int, horizon: int, method: Method) -> float:
    """The mean absolute error over the mean value, forecast from several earlier moments; inf where it fails."""
    scale = float(np.abs(history).mean()) or 1.0
    apart = max((len(history) - _LEAST_BINS) // (2 * _NUM_ORIGINS), 1)
    errors = []
    for number in range(_NUM_ORIGINS):
        origin = len(history) - horizon - number * apart
        if origin < _LEAST_BINS or (season and origin < season + 1):
            break
        values = np.maximum(method(history[:origin], season, horizon), 0.0)
        errors.append(float(np.abs(values - history[origin : origin + horizon]).mean()) / scale)
    return float(np.mean(errors)) if errors and np.isfinite(errors).all() else np.inf


def season_of(history: Floats) -> int:
    """The season's length in bins, the strongest peak of the autocorrelation; 0 without a clear one."""
    values = history - history.mean() if len(history) else history
    num, power = len(values), float((values * values).sum())
    if num < 2 * _LEAST_SEASON + 2 or power <= 0:
        return 0
    spectrum = np.fft.rfft(values, 2 * num)
    lags = np.fft.irfft(np.abs(spectrum) ** 2)[:num] / power
    unbiased = lags[: num // 2 + 1] * num / (num - np.arange(num // 2 + 1))
    peaks = [
        lag
        for lag in range(_LEAST_SEASON, min(len(unbiased) - 1, _MOST_SEASON))
        if unbiased[lag] >= unbiased[lag - 1] and unbiased[lag] >= unbiased[lag + 1] and unbiased[lag] > _CORRELATED
    ]
    return max(peaks, key=lambda lag: unbiased[lag] - 1e-3 * lag / num, default=0)


def _last(history: Floats, season: int, horizon: int) -> Floats:
    return np.full(horizon, float(history[-1]) if len(history) else 0.0)


def _seasonal_naive(history: Floats, season: int, horizon: int) -> Floats:
    if not season or len(history) < season:
        return np.full(horizon, np.nan)
    return np.resize(history[-season:], horizon)


def _holt_winters(history: Floats, season: int, horizon: int) -> Floats:
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    recent = history[-max(_FITTED_BINS, 3 * season) :]
    has_season = season > 1 and len(recent) >= 2 * season
    seasonal = {"seasonal": "add", "seasonal_periods": season} if has_season else {}
    return _fitted(
        lambda: ExponentialSmoothing(recent, trend="add", damped_trend=True, **seasonal).fit().forecast(horizon),
        horizon,
    )


def _arima(history: Floats, season: int, horizon: int) -> Floats:
    from statsmodels.tsa.arima.model import ARIMA

    recent, options = history[-_FITTED_BINS:], {"maxiter": 50}
    return _fitted(lambda: ARIMA(recent, order=(2, 0, 1)).fit(method_kwargs=options).forecast(horizon), horizon)


def _fitted(fit: Callable[[], Floats], horizon: int) -> Floats:
    """What it returns; NaN where the fit fails, as it may for any history."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(fit(), dtype=np.float64)
    except (ValueError, np.linalg.LinAlgError):
        return np.full(horizon, np.nan)
