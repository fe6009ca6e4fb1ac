"""The spreads of the logits at the starts of transitions, and how many of the smallest are in the range of the law."""

from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import ArrayLike

from sdeinfer.infer._coordinates import LayerAt
from sdeinfer.infer._measures import measure
from sdeinfer.layers import Architecture, limit_on_host
from sdeinfer.likelihood import ATTENTION_GROWTH, SPREAD

ATTENTION_GROWTH_AS_SPREAD, WITH_SPREAD = 1.9, 2.26
"""A growth g of V by the attention of one layer counts as a spread of 1.9 √g, or of 2.26 (g s²)^¼ if that is less. With
six tokens, five of them near copies, the score of log τ0 is biased by 0.02 of its information for g < 0.1, by 0.13 for
0.1 to 0.3."""


class Spreads:
    """Spreads of the used transitions for τ0 = 1, with their growths.

    Attributes:
        used: whether each transition is used, shape (networks, transitions).
    """

    def __init__(self, data: xr.Dataset, used: np.ndarray):
        self._data, self.used = data, used
        self._scale, self._growth = measure(data, SPREAD)[used], measure(data, ATTENTION_GROWTH)[used]

    def ordered(
        self, noise: ArrayLike = 1.0, relative_tau0: ArrayLike = 1.0, drift: ArrayLike = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the transitions in ascending order of the spread to which each may grow; and these spreads.

        Arguments:
            noise: the noise of the layer, or of each network's.
            relative_tau0: τ0 of each network's layer, relative to the smallest.
            drift: τ0² θ₁ of the layer, or of each network's.
        """
        grown = _with_growth(self._scale, of_each(drift, self.used) * self._growth)
        grown = grown / of_each(relative_tau0, self.used) * latent_growth(self._data, self.used, noise)
        order = np.argsort(grown)
        return order, grown[order]


class Coldest(NamedTuple):
    """The smallest of a layer's temperatures, which determines the spread, or of each network's layer.

    Attributes:
        log_tau0: log τ0, shape () or (networks,).
        sd: the largest standard deviation of log τ0.
        noise: the noise of the layer.
        drift: τ0² θ₁.
    """

    log_tau0: np.ndarray
    sd: float
    noise: np.ndarray
    drift: np.ndarray

    @classmethod
    def of(cls, kind: Architecture, layer: LayerAt) -> "Coldest":
        coordinates = kind.coordinates
        places = [list(coordinates.sampled).index(name) for name in coordinates.temperatures]
        coldest = np.argmin(layer.u[..., places], axis=-1, keepdims=True)
        log_tau0, sd = (np.take_along_axis(x[..., places], coldest, axis=-1)[..., 0] for x in (layer.u, layer.sd))
        drift = np.exp(2 * log_tau0) * coefficient(kind, layer.u, "attention_drift")
        return cls(log_tau0, float(np.max(sd)), coefficient(kind, layer.u, "linear_noise"), drift)


def _with_growth(spread: np.ndarray, growth: np.ndarray) -> np.ndarray:
    """The spreads that count, from the spreads and the growths of V by attention, both for τ0 = 1."""
    of_growth = ATTENTION_GROWTH_AS_SPREAD * np.sqrt(growth)
    return np.maximum(spread, np.minimum(of_growth, WITH_SPREAD * np.sqrt(spread * np.sqrt(growth))))


def of_each(values: ArrayLike, used: np.ndarray) -> np.ndarray:
    """A value of each used transition, from one for all networks or one for each."""
    values = np.asarray(values)
    return values[np.nonzero(used)[0]] if values.ndim else values


def latent_growth(data: xr.Dataset, used: np.ndarray, noise: ArrayLike) -> np.ndarray | float:
    """Factor by which the spread may grow (two standard deviations) in latent layers before the next observation."""
    latent = np.diff(data["layer"].values) - 1
    if not latent.any():
        return 1.0
    network, layer = np.nonzero(used)
    return np.exp(2 * np.sqrt(2 * of_each(noise, used) * latent[layer] / data["width"].values[network]))


def coefficient(kind: Architecture, u: np.ndarray, name: str) -> np.ndarray:
    """A coefficient of the limit at coordinates u."""
    each = [getattr(limit_on_host(kind.layer_at(here)), name) for here in np.atleast_2d(u)]
    return np.asarray(each).reshape(u.shape[:-1])


def transitions_allowed(spread: np.ndarray, largest: float, *, seen: int, sd: float) -> int:
    """Number of transitions with the smallest spreads that minimises the error of log τ0.

    Arguments:
        spread: spreads of the transitions, ascending.
        largest: bound on the spread.
        seen: number of transitions in the estimate of τ0.
        sd: standard deviation of log τ0 given these; 0 for a fixed τ0, which allows all transitions up to the bound.
    """
    if sd == 0:
        return int((spread <= largest).sum())
    bounded = np.minimum(spread, 1.0)
    information = np.cumsum(bounded**4)
    of_series = np.cumsum(bounded**8) / information
    of_data = sd * np.sqrt(information[seen - 1] / information)
    error = np.where(spread <= largest, of_series**2 + of_data**2, np.inf)
    return int(np.argmin(error)) + 1 if spread[0] <= largest else 0
