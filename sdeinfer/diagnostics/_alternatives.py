"""Other architectures and sizes, fitted to the transitions of a posterior.

The number of heads, an output projection, the expansion and the architecture itself change the law by factors that the
parameters can absorb: the fit is good and the parameters are wrong. Each alternative is therefore fitted to a sample of
the transitions by Fisher scoring, and compared with the fitted architecture by Laplace's approximation of its evidence.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer.infer import Innovations, innovations_of, law_at
from sdeinfer.layers import ARCHITECTURES, AbstractArchitecture, Architecture
from sdeinfer.likelihood import Path, Terms, any_transitions, mean_features, terms_by_block, with_mask

SAMPLE = 8192
"""Largest number of transitions to which alternatives are fitted."""

VALUES = {"heads": (1, 2, 4, 8), "output_projection": (False, True), "expansion": (1, 4), "causal": (False, True)}
"""Values of each size that are compared."""

PRIOR_SD = 1.5
"""Prior standard deviation of every coordinate on the real line, about 0; close to those of the default priors."""

STEPS, SMALLEST_GAIN = 25, 1e-3
"""Largest number of steps of Fisher scoring; and the gain in log density below which they end."""

LARGEST_COORDINATE = 8.0
"""Bound on the coordinates, as in the search for the mode."""


class _Sample(NamedTuple):
    """Transitions in the coordinates of one mask, with their terms by block."""

    path: Path
    widths: np.ndarray
    centre: np.ndarray
    terms: tuple[tuple[np.ndarray, Terms], ...]

    @classmethod
    def of(cls, data: xr.Dataset, *, causal: bool) -> "_Sample":
        path = any_transitions(with_mask(data, causal=causal)).thinned(SAMPLE)
        return cls(path, np.unique(path.width), mean_features(path), tuple(terms_by_block(path)))

    def innovations(self, kind: AbstractArchitecture, u: np.ndarray, law: str) -> Iterator[Innovations]:
        """The innovations under the law of an architecture at coordinates u."""
        there = law_at(kind, u, widths=self.widths, centre=self.centre, law=law)
        for block, terms in self.terms:
            yield innovations_of(self.path, block, terms, there)


class _Score(NamedTuple):
    """Log density at coordinates u, with its gradient, the information and the scatter of the score."""

    u: np.ndarray
    density: float
    slope: np.ndarray
    information: np.ndarray
    scatter: np.ndarray

    @classmethod
    def at(cls, kind: AbstractArchitecture, sample: _Sample, law: str, u: np.ndarray) -> "_Score":
        count = len(u)
        density, slope = -np.sum(u**2) / (2 * PRIOR_SD**2), -u / PRIOR_SD**2
        information, scatter = np.zeros((count, count)), np.zeros((count, count))
        for here in sample.innovations(kind, u, law):
            density += np.sum(here.terms.log_jacobian) - np.sum(here.y**2 / 2 + np.log(here.sd))
            slope = slope + here.score.sum(axis=0)
            information += here.information
            scatter += here.score.T @ here.score
        return cls(u, float(density), slope, information, scatter)

    @property
    def curvature(self) -> np.ndarray:
        """Expected curvature of the log posterior."""
        return self.information + np.eye(len(self.u)) / PRIOR_SD**2

    @property
    def dispersion(self) -> float:
        """Scatter of the score relative to the information, averaged over directions; at least 1."""
        scatter, information = (np.trace(np.linalg.solve(self.curvature, x)) for x in (self.scatter, self.information))
        return max(1.0, float(scatter / information)) if information > 0 else 1.0

    def evidence(self, dispersion: float) -> float:
        """Laplace's approximation of the log evidence, with the log likelihood divided by a dispersion."""
        prior = -np.sum(self.u**2) / (2 * PRIOR_SD**2)
        likelihood = (self.density - prior) / dispersion
        curvature = self.information / dispersion + np.eye(len(self.u)) / PRIOR_SD**2
        volume = -np.linalg.slogdet(curvature)[1] / 2 - len(self.u) * np.log(PRIOR_SD)
        return float(likelihood + prior + volume)


def alternatives(post: xr.DataTree, data: xr.Dataset, kind: Architecture) -> pd.DataFrame:
    """Compare the fitted architecture with others, and with other sizes of its own.

    Arguments:
        post: the result of `fit` to networks observed at every layer, with one layer for all of them.
        data: the data that were fitted.
        kind: the fitted architecture.

    Returns:
        One row per alternative, the best first, with columns `architecture` (an `Architecture`); `evidence`, its log
        evidence less that of the fitted architecture; and, for each coordinate that both have, such as γ, the value at
        the alternative's mode (in the parameter's own unit) and `<name>_fitted`, that at the fitted architecture's.
    """
    law = str(post.attrs.get("law", "limit"))
    layers = post["layers"].to_dataset()
    u = kind.coordinates.unconstrained({name: float(layers[name].values[0]) for name in kind.coordinates.declared})
    start = dict(zip(kind.coordinates.sampled, np.asarray(u), strict=True))
    samples: dict[bool, _Sample] = {}
    found: dict[Architecture, _Score] = {}
    for each in (kind, *neighbours(kind, data, law)):
        if each.causal not in samples:
            samples[each.causal] = _Sample.of(data, causal=each.causal)
        found[each] = _mode(each, samples[each.causal], law, start)
    own = found.pop(kind)
    rows = {
        described(each): {
            "architecture": each,
            "evidence": score.evidence(own.dispersion) - own.evidence(own.dispersion),
            **_values(each, score.u),
            **{f"{name}_fitted": value for name, value in _values(kind, own.u).items()},
        }
        for each, score in found.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").sort_values("evidence", ascending=False)


def neighbours(kind: Architecture, data: xr.Dataset, law: str) -> list[Architecture]:
    """The other architectures with the same sizes, and the same architecture with one other size."""
    tokens, widths = data.sizes["token_a"], data["width"].values
    found = [] if kind.causal else [Architecture(name) for name in ARCHITECTURES if name != kind.name]
    for size in kind.sizes:
        for value in VALUES[size]:
            other = dataclasses.replace(kind, **{size: value})
            if other != kind and (size != "causal" or law == "limit"):
                found.append(other)
    return [
        each for each in found if (tokens > 1 or not each.coordinates.temperatures) and not (widths % each.heads).any()
    ]


def described(kind: Architecture) -> str:
    """The name of an architecture and its sizes, such as "attention, heads 4, no output projection"."""
    words = [kind.name]
    for size in kind.sizes:
        value, name = getattr(kind, size), size.replace("_", " ")
        words.append(f"{name} {value:g}" if size in ("heads", "expansion") else f"{'' if value else 'no '}{name}")
    return ", ".join(words)


def _mode(kind: Architecture, sample: _Sample, law: str, start: Mapping[str, float]) -> _Score:
    """The mode by Fisher scoring with step halving, from the fitted values of the common coordinates."""
    u = np.clip([start.get(name, 0.0) for name in kind.coordinates.sampled], -LARGEST_COORDINATE, LARGEST_COORDINATE)
    here = _Score.at(kind, sample, law, np.asarray(u, float))
    for _ in range(STEPS):
        step, gain = np.linalg.solve(here.curvature, here.slope), -np.inf
        for _ in range(6):
            there = _Score.at(kind, sample, law, np.clip(here.u + step, -LARGEST_COORDINATE, LARGEST_COORDINATE))
            gain = there.density - here.density
            if gain > 0:
                here = there
                break
            step = step / 4
        if not gain > SMALLEST_GAIN:
            break
    return here


def _values(kind: Architecture, u: np.ndarray) -> dict[str, float]:
    """Values of the identified coordinates in their own units."""
    sampled = kind.coordinates.sampled
    return {
        name: float(parameter.from_real(x))
        for (name, parameter), x in zip(sampled.items(), u, strict=True)
        if parameter.identified
    }
