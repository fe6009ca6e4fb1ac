"""Tests of the one-step innovations of observed layers against the fitted law.

Under the law the innovations y of a layer have mean 0 and variance 1 given the preceding layers. Every sum

    g_k = Σ a_k y  +  Σ c_k (y² − 1)/2

over a layer, with weights that are functions of the preceding layers, is therefore a martingale difference: the sum
over all layers is asymptotically normal with variance Σ g_k², however the weights are correlated. It is the score of a
further parameter that shifts the means by a_k and the relative variances by c_k. At the posterior mean instead of the
truth, the effect of estimating the parameters is projected out, g_k − A_k H⁻¹ s with the score s, the information H and
A_k = Σ (a_k μ′/σ + c_k (log σ²)′/2) (Neyman's C(α)). Each direction detects one kind of misfit.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from sdeinfer._files import InputError
from sdeinfer.diagnostics._directions import DIRECTIONS, memory, weights
from sdeinfer.diagnostics._posterior import Posterior
from sdeinfer.infer import innovations, law_at
from sdeinfer.infer._innovations import Innovations, LawAt, mean_and_variance
from sdeinfer.infer._sandwich import omitted_order
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood import any_transitions, with_pattern
from sdeinfer.likelihood._transitions import Path

SOFTMAX, WIDTH = "omitted order of the softmax", "finite width"
OMISSIONS = (SOFTMAX, WIDTH)
"""Names of the parts that a law omits, whose sizes are known. Posterior standard deviations include the first."""

LARGEST = 5.0
"""Bound at which |y| is clipped, so that one outlier does not mask others; under the law one in two million is."""


def innovation_tests(
    post: xr.DataTree, data: xr.Dataset | None = None, architecture: AbstractLayer | None = None
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
    return sums_of(Posterior.of(post, data, architecture)).tests


def sums_of(posterior: Posterior) -> "Sums":
    """The sums over the innovations of all distinct layers, of the data in a posterior."""
    kind = posterior.known_kind
    parts = [Sums.of(path, at, Omissions.of(kind, at, posterior.law)) for path, at in laws_of(posterior)]
    return jax.tree.map(lambda *each: np.sum(each, axis=0), *parts).repeated(posterior.repetitions)


def laws_of(posterior: Posterior) -> Iterator[tuple[Path, LawAt]]:
    """Iterate over the distinct layers: the transitions of a layer's networks, and the law at its posterior mean."""
    kind = posterior.known_kind
    path = any_transitions(with_pattern(posterior.data, kind.pattern), kind.other_terms)
    layers = posterior.tree["layers"].to_dataset()
    u = kind.coordinates.unconstrained({name: layers[name].values for name in kind.coordinates.declared}).T
    each, number = np.unique(u, axis=0, return_inverse=True)
    for index, here in enumerate(each):
        mine = path.of_networks(np.flatnonzero(number.reshape(-1) == index))
        if len(mine):
            yield mine, law_at(kind, here, widths=np.unique(mine.width), law=posterior.law)


class Omissions(NamedTuple):
    """Terms that a law omits, with known size: the next order of the softmax, and the finite width by the limit's law.

    Attributes:
        tau0: smallest τ0 of the layer; +∞ without attention.
        exact: the law of finite width at the same parameters, where the limit's law was fitted; None otherwise.
    """

    tau0: float
    exact: LawAt | None

    @classmethod
    def of(cls, kind: AbstractLayer, at: LawAt, law: str) -> "Omissions":
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
        """Omitted means, in standard deviations, and omitted relative variances; shape (transitions, p, omissions)."""
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
        score: s, shape (parameters,).
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
    score: np.ndarray
    information: np.ndarray
    scatter: np.ndarray
    of_networks: np.ndarray
    omitted: np.ndarray
    completed: np.ndarray
    layers: int

    @classmethod
    def of(cls, path: Path, law: LawAt, omissions: Omissions) -> "Sums":
        """The sums over the layers of a path.

        Scores have an axis of the parameters, the omissions, which have known sizes up to factors of about 1 and are
        estimated as parameters, and the directions.
        """
        own, known = np.s_[: len(law.u)], np.s_[: len(law.u) + len(OMISSIONS)]
        others, tested = np.s_[own.stop : known.stop], np.s_[known.stop :]
        count = known.stop + len(DIRECTIONS)
        score, squares, information = np.zeros(count), np.zeros((count, count)), np.zeros((count, count))
        each = np.zeros((len(path.width), own.stop))
        for here in innovations(path, law):
            at = path.coordinates(here.transitions)
            here = here._replace(y=np.clip(here.y, -LARGEST, LARGEST))  # noqa: PLW2901 without outliers
            parts = (here.mean, here.log_variance), omissions.at(path, here, law), weights(path, here, at)
            mean, log_variance = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
            every = here._replace(mean=mean, log_variance=log_variance)
            s = every.score
            s[:, -1] = memory(path, here, at)
            score, squares, information = score + s.sum(axis=0), squares + s.T @ s, information + every.information
            information[-1, -1] += here.y.shape[1] * np.count_nonzero(s[:, -1])
            np.add.at(each, path.network[here.transitions], s[:, own])
        along, own_information = information[tested, known], information[own, own]
        projected = along @ inverse_of(information[known, known] + np.eye(known.stop))
        exact = own_information
        if omissions.exact is not None:
            exact = np.sum([here.information for here in innovations(path, omissions.exact)], axis=0)
        of_known = (projected @ squares[known, known] * projected).sum(axis=1)
        return cls(
            corrected=score[tested] - projected @ score[known],
            squares=np.diag(squares)[tested] - 2 * (projected * squares[tested, known]).sum(axis=1) + of_known,
            sizes=np.diag(information)[tested] - (projected * along).sum(axis=1),
            along=along[:, own],
            score=score[own],
            information=own_information,
            scatter=squares[own, own],
            of_networks=each.T @ each,
            omitted=information[others, own],
            completed=np.stack([own_information, exact]),
            layers=len(path),
        )

    def repeated(self, times: float) -> "Sums":
        """The sums that determine moves and standard deviations, as of so many times the layers; not those of tests."""
        names = ("along", "score", "information", "scatter", "of_networks", "omitted", "completed")
        return self._replace(**{name: times * getattr(self, name) for name in names})

    @property
    def tests(self) -> pd.DataFrame:
        """The table of `innovation_tests`."""
        kept = (self.squares > 0) & (self.sizes > 0)
        found, squares, sizes = (x[kept] for x in (self.corrected, self.squares, self.sizes))
        names = [name for name, there in zip(DIRECTIONS, kept, strict=True) if there]
        z = found / np.sqrt(squares)
        columns = {"effect": found / np.sqrt(sizes * self.layers), "z": z, "p": 2 * stats.norm.sf(np.abs(z))}
        return pd.DataFrame(columns, index=pd.Index(names, name="direction"))

    @property
    def dispersion(self) -> float:
        """Scatter of the score relative to the information, averaged over directions; at least 1."""
        inverse = inverse_of(self.information + np.eye(len(self.information)))
        scatter, information = (np.trace(inverse @ x) for x in (self.scatter, self.information))
        return max(1.0, float(scatter / information)) if information > 0 else 1.0


def inverse_of(information: np.ndarray) -> np.ndarray:
    """The inverse of a positive definite matrix.

    Exploding networks, and nearly equal tokens, make an information so ill-conditioned that small eigenvalues are lost
    to rounding; they count as zero, and the others are those of coordinates with one unit of information each.
    """
    scale = np.sqrt(np.diagonal(information))
    inverse = np.linalg.pinv(information / np.outer(scale, scale), hermitian=True) / np.outer(scale, scale)
    inverse[np.diag_indices_from(inverse)] = np.maximum(np.diagonal(inverse), 0.0)
    return inverse
