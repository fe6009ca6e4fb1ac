"""Tests of the one-step innovations of observed layers against the fitted law.

Under the law the innovations y of a layer have mean 0 and variance 1 given the preceding layers. Every sum

    g_k = Σ a_k y  +  Σ c_k (y² − 1)/2

over a layer, with weights that are functions of the preceding layers, is therefore a martingale difference: the sum
over all layers is asymptotically normal with variance Σ g_k², however the weights are correlated. At the posterior mean
instead of the truth, the effect of estimating the parameters is projected out, g_k − A_k H⁻¹ s with the score s, the
information H and A_k = Σ (a_k μ′/σ + c_k (log σ²)′/2) (Neyman's C(α)). Each direction detects one kind of misfit.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float
from scipy import stats

from sdeinfer._files import InputError
from sdeinfer.covariance import PatternSpectrum, Spectrum, pairs, tokens_of, unvech, vech
from sdeinfer.diagnostics._fitted import fitted_data
from sdeinfer.infer import Innovations, LawAt, innovations, law_at, mean_and_variance, omitted_order
from sdeinfer.layers import Architecture, architecture_in
from sdeinfer.likelihood import Path, any_transitions, with_pattern

DIRECTIONS = {
    "growth": "V grows or shrinks as a whole: λ² + γ² = 1 does not hold, the weights have another variance, or "
    "attention lacks its identity or centring",
    "growth of differences": "tokens spread or collapse at another rate than in the architecture",
    "attention's drift": "the drift is not that of shaped, centred attention",
    "ReLU's drift": "the drift is not that of a shaped ReLU",
    "noise of variances": "the noise of a layer is not that of the architecture: check width, heads and branches",
    "noise of correlations": "the noise of a layer is not that of the architecture: check width, heads and branches",
    "noise of attention": "the noise does not grow with the differences of tokens as in this attention",
    "memory": "successive layers are correlated: they share weights, or are not independent draws",
}
"""Interpretation of a deviation in each direction."""

SOFTMAX, WIDTH = "omitted order of the softmax", "finite width"
OMISSIONS = (SOFTMAX, WIDTH)
"""Names of the parts that a law omits, whose sizes are known. Posterior standard deviations include the first."""

OMITTED = len(OMISSIONS)

LARGEST = 5.0
"""Bound at which |y| is clipped, so that one outlier does not mask others; under the law one in two million is."""


def innovation_tests(
    post: xr.DataTree, data: xr.Dataset | None = None, architecture: Architecture | None = None
) -> pd.DataFrame:
    """Test the innovations of every layer at the posterior mean, in each direction.

    Arguments:
        post: the result of `fit` to networks observed at every layer.
        data: the data that were fitted, to be compared with those in the posterior, as in `check`.
        architecture: the kind of layer, where the posterior's attributes do not name one that is known.

    Returns:
        One row per direction, with columns `effect`, the root mean square of the misfit over layers, in standard
        deviations of a layer's increments, without the part that the parameters absorb; `z`, its deviation from zero in
        standard errors; and the two-sided `p`.
    """
    return sums_of(post, fitted_data(post, data), architecture).tests()


def sums_of(post: xr.DataTree, data: xr.Dataset, architecture: Architecture | None = None) -> "Sums":
    """The sums over the innovations of all distinct layers, of the data in a posterior."""
    kind, law = architecture or architecture_in(post.attrs), post.attrs.get("law", "limit")
    assert kind is not None
    parts = [Sums.of(path, at, Omissions.of(kind, at, path, law)) for path, at in laws_of(post, data, kind)]
    sums = jax.tree.map(lambda *each: np.sum(each, axis=0), *parts)
    return sums.repeated(repetitions(post, int(sums.layers)))


def repetitions(post: xr.DataTree, transitions: int) -> float:
    """The ratio of all transitions of a fit to those at hand; above 1 for data in chunks, of which some are kept."""
    return float(post.attrs.get("used_transitions", transitions)) / transitions


def laws_of(
    post: xr.DataTree, data: xr.Dataset, architecture: Architecture | None = None
) -> Iterator[tuple[Path, LawAt]]:
    """Iterate over the distinct layers: the transitions of a layer's networks, and the law at its posterior mean.

    Arguments:
        post: the result of `fit`.
        data: the data in the posterior.
        architecture: the kind of layer, where the posterior's attributes do not name one that is known.
    """
    kind, law = architecture or architecture_in(post.attrs), post.attrs.get("law", "limit")
    assert kind is not None
    path = any_transitions(with_pattern(data, kind.pattern))
    layers = post["layers"].to_dataset()
    u = kind.coordinates.unconstrained({name: layers[name].values for name in kind.coordinates.declared}).T
    each, number = np.unique(u, axis=0, return_inverse=True)
    for index, here in enumerate(each):
        mine = path.of_networks(np.flatnonzero(number.reshape(-1) == index))
        if len(mine):
            yield mine, law_at(kind, here, widths=np.unique(mine.width), law=law)


class Omissions(NamedTuple):
    """Terms that a law omits, with known size: the next order of the softmax, and the finite width by the limit's law.

    Attributes:
        tau0: smallest τ0 of the layer; +∞ without attention.
        exact: the law of finite width at the same parameters, where the limit's law was fitted; None otherwise.
    """

    tau0: float
    exact: LawAt | None

    @classmethod
    def of(cls, kind: Architecture, at: LawAt, path: Path, law: str) -> "Omissions":
        """The omissions of a law of one kind of layer."""
        values = kind.coordinates.constrained(at.u)
        tau0 = min((float(values[name]) for name in kind.coordinates.temperatures), default=math.inf)
        exact = None
        if law == "limit" and kind.pattern.everything:
            # A layer of a user may have no law of finite width.
            with contextlib.suppress(InputError):
                exact = law_at(kind, at.u, widths=at.widths, law="finite-width")
        return cls(tau0, exact)

    def at(self, path: Path, here: Innovations, law: LawAt) -> tuple[np.ndarray, np.ndarray]:
        """Omitted means, in standard deviations, and omitted relative variances; shape (transitions, p, `OMITTED`)."""
        zero = np.zeros_like(here.y)
        softmax = (zero, zero) if math.isinf(self.tau0) else omitted_order(path, here, law, self.tau0)
        width = (zero, zero)
        if self.exact is not None:
            number = path.width_index(law.widths, here.transitions)
            fitted, exact = (mean_and_variance(here.terms, x.moments.at(number)) for x in (law, self.exact))
            width = ((exact[0] - fitted[0]) / here.sd, exact[1] / fitted[1] - 1)
        mean, variance = (np.stack(each, axis=-1) for each in zip(softmax, width, strict=True))
        return mean, variance


class Sums(NamedTuple):
    """Sums over layers, for the directions g, the score s of the parameters and the omissions.

    Attributes:
        corrected: Σ (g − A_k H⁻¹ s), shape (directions,).
        squares: Σ (g − A_k H⁻¹ s)², shape (directions,).
        sizes: derivative of `corrected` in the size of a misfit in the same direction, shape (directions,).
        along: A, shape (directions, parameters).
        information: H, shape (parameters, parameters).
        scatter: Σ s sᵀ, shape (parameters, parameters).
        of_networks: Σ s sᵀ with s summed over the layers of a network, shape (parameters, parameters).
        omitted: shift of the score by each omission, shape (omissions, parameters).
        completed: as `information`, by the law with each omission, where it is known; shape (omissions, parameters,
            parameters).
        layers: number of layers.
    """

    corrected: np.ndarray
    squares: np.ndarray
    sizes: np.ndarray
    along: np.ndarray
    information: np.ndarray
    scatter: np.ndarray
    of_networks: np.ndarray
    omitted: np.ndarray
    completed: np.ndarray
    layers: int

    @classmethod
    def of(cls, path: Path, law: LawAt, omissions: Omissions) -> "Sums":
        """The sums over the layers of a path."""
        parameters, count, unknown = law.slopes.drift.shape[-1], len(DIRECTIONS), law.slopes.drift.shape[-1] + OMITTED
        along, weights = np.zeros((count, unknown)), np.zeros(count)
        total, squares, products = np.zeros(count), np.zeros(count), np.zeros((count, unknown))
        score, information, scatter = np.zeros(unknown), np.eye(unknown), np.zeros((unknown, unknown))
        each = np.zeros((len(path.width), unknown))
        for here in innovations(path, law):
            at = path.coordinates(here.transitions)
            of_mean, of_variance = _weights(path, here, at)
            memory = _memory(path, here, at)
            y = np.clip(here.y, -LARGEST, LARGEST)
            g = np.einsum("ktp,tp->tk", of_mean, y) + np.einsum("ktp,tp->tk", of_variance, y**2 - 1) / 2
            g = np.concatenate([g, memory[:, None]], axis=1)
            # The omitted parts have known sizes, up to factors of about 1, and are estimated as parameters.
            mean, log_variance = (
                np.concatenate(parts, axis=-1)
                for parts in zip((here.mean, here.log_variance), omissions.at(path, here, law), strict=True)
            )
            here = here._replace(y=y, mean=mean, log_variance=log_variance)  # noqa: PLW2901 with the omissions
            along[:-1] += np.einsum("ktp,tpj->kj", of_mean, mean)
            along[:-1] += np.einsum("ktp,tpj->kj", of_variance, log_variance) / 2
            weights[:-1] += (of_mean**2).sum(axis=(1, 2)) + (of_variance**2).sum(axis=(1, 2)) / 2
            weights[-1] += y.shape[1] * np.count_nonzero(memory)
            s = here.score
            total, squares, products = total + g.sum(axis=0), squares + (g**2).sum(axis=0), products + g.T @ s
            score, information, scatter = score + s.sum(axis=0), information + here.information, scatter + s.T @ s
            np.add.at(each, path.network[here.transitions], s)
        projected, own = along @ inverse_of(information), np.s_[:parameters]
        information_left = information[own, own] - np.eye(parameters)
        exact = information_left if omissions.exact is None else _information(path, omissions.exact)
        return cls(
            corrected=total - projected @ score,
            squares=squares - 2 * (projected * products).sum(axis=1) + (projected @ scatter * projected).sum(axis=1),
            sizes=weights - (projected * along).sum(axis=1),
            along=along[:, own],
            information=information_left,
            scatter=scatter[own, own],
            of_networks=(each.T @ each)[own, own],
            omitted=information[parameters:, own],
            completed=np.stack([information_left, exact]),
            layers=len(path),
        )

    def repeated(self, times: float) -> "Sums":
        """The sums that determine moves and standard deviations, as of so many times the layers; not those of tests."""
        names = ("along", "information", "scatter", "of_networks", "omitted", "completed")
        return self._replace(**{name: times * getattr(self, name) for name in names})

    def tests(self) -> pd.DataFrame:
        """The table of `innovation_tests`."""
        kept = (self.squares > 0) & (self.sizes > 0)
        found, squares, sizes = (x[kept] for x in (self.corrected, self.squares, self.sizes))
        names = [name for name, there in zip(DIRECTIONS, kept, strict=True) if there]
        z = found / np.sqrt(squares)
        columns = {"effect": found / np.sqrt(sizes * self.layers), "z": z, "p": 2 * stats.norm.sf(np.abs(z))}
        return pd.DataFrame(columns, index=pd.Index(names, name="direction"))

    def dispersion(self) -> float:
        """Scatter of the score relative to the information, averaged over directions; at least 1."""
        inverse = inverse_of(self.information + np.eye(len(self.information)))
        scatter, information = (np.trace(inverse @ x) for x in (self.scatter, self.information))
        return max(1.0, float(scatter / information)) if information > 0 else 1.0


def _information(path: Path, law: LawAt) -> np.ndarray:
    """The information on the parameters by a law, shape (parameters, parameters)."""
    return np.sum([here.information for here in innovations(path, law)], axis=0)


def inverse_of(information: np.ndarray) -> np.ndarray:
    """The inverse of a positive definite matrix.

    Exploding networks, and nearly equal tokens, make an information so ill-conditioned that small eigenvalues are lost
    to rounding; they count as zero, and the others are those of coordinates with one unit of information each.
    """
    scale = np.sqrt(np.diagonal(information))
    inverse = np.linalg.pinv(information / np.outer(scale, scale), hermitian=True) / np.outer(scale, scale)
    inverse[np.diag_indices_from(inverse)] = np.maximum(np.diagonal(inverse), 0.0)
    return inverse


def _weights(path: Path, here: Innovations, at: Spectrum | PatternSpectrum) -> tuple[np.ndarray, np.ndarray]:
    """Weights a and c of all directions but the last, shape (directions, transitions, p)."""
    y, e = here.y, here.terms.mixing
    if isinstance(at, PatternSpectrum):
        growth, spread, diagonal = _pattern_weights(path.starts(here.transitions), at)
    else:
        rows, columns = pairs(tokens_of(y.shape[1]))
        growth = diagonal = np.broadcast_to(np.where(rows == columns, 1.0, 0.0), y.shape)
        spread = diagonal * np.sqrt(e / 2)
    drift = here.terms.drift
    zero = np.zeros_like(y)
    with_attention = e - e.mean(axis=1, keepdims=True)
    of_mean = np.stack([growth, spread, drift[:, 0], drift[:, 1], zero, zero, zero])
    of_variance = np.stack([zero, zero, zero, zero, diagonal, 1 - diagonal, with_attention])
    return _at_most_one(of_mean / here.sd), _at_most_one(of_variance)


def _at_most_one(weights: np.ndarray) -> np.ndarray:
    """Weights bounded per layer, so that an exploding layer does not dominate the sum."""
    return weights / np.sqrt(1 + (weights**2).sum(axis=-1, keepdims=True))


def _memory(path: Path, here: Innovations, at: Spectrum | PatternSpectrum) -> np.ndarray:
    """Products of each layer's innovations with those of the preceding layer, in the same coordinates."""
    chosen = here.transitions
    follows = (np.diff(path.network[chosen]) == 0) & (np.diff(path.layer[chosen]) == 1)
    tokens = tokens_of(here.y.shape[1])
    rows, columns = pairs(tokens)
    packed = np.clip(here.y, -LARGEST, LARGEST) * np.where(rows == columns, np.sqrt(2), 1.0)
    y = unvech(packed)
    earlier, now = (jax.tree.map(lambda x, some=some: x[some], at) for some in (slice(-1), slice(1, None)))
    # Transform from the coordinates of each transition to those of the next.
    before = now.whiten(earlier.colour(y[:-1]))
    return np.concatenate([[0.0], np.where(follows, (before * y[1:]).sum(axis=(1, 2)) / 2, 0.0)])


def _pattern_weights(
    V: Float[np.ndarray, "transitions m m"], at: PatternSpectrum
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The directions of V and V H V in the coordinates of a pattern, and the weight of each entry on the diagonal.

    Without a mask the directions are diagonal: the identity and δ/m.
    """
    rows, columns = pairs(V.shape[-1])
    equal = np.where(rows == columns, 1.0, 0.0)
    moved = V @ (V - V.mean(axis=-2, keepdims=True))
    growth, spread = (vech(at.whiten(S)) * np.where(equal == 1, 1.0, np.sqrt(2.0)) for S in (V, moved))
    return growth, spread / V.shape[-1], (equal[:, None] * at.rotation**2).sum(axis=-2)
