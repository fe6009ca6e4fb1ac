"""Verdicts on a fit of increments: are they those of the blocks, and independent?"""

import functools

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float
from scipy import stats

from sdeinfer.blocks import interpolated, scale_free
from sdeinfer.diagnostics._advice import at_most, of_contractions, sampler_verdicts, with_precision
from sdeinfer.diagnostics._dependence import Dependence, dependence_of_pairs, dependence_on_input, kurtosis_of_normals
from sdeinfer.diagnostics._summary import fixed_of, identified_of, summarise
from sdeinfer.diagnostics._thresholds import LEVEL
from sdeinfer.diagnostics._verdict import Check, Verdict

TESTS = 7
"""Number of tests of the law, among which `LEVEL` is divided."""

ALIKE = 1.1
"""Largest acceptable ratio of a significant strength of one layer to that of all, or its inverse."""

SPREAD = 0.25
"""Largest acceptable distance of χ² over its degrees of freedom from 1, where it is significant."""

CORRELATED = 0.01
"""Largest acceptable share of an increment's variance that another branch, or the input, explains beyond chance."""

KURTOSIS = 0.2
"""Largest acceptable relative excess of the fourth moment of increments over that of normals, where significant."""

UNNORMED = 0.1
"""Largest acceptable distance of a mean square after a norm from 1; the constant in the root takes some percent."""

RESHAPED = 1.15
"""Largest acceptable ratio of a gain or temperature that the data prefer to the assumed one, where significant."""


def check_branches(post: xr.DataTree) -> Check:
    """Check a fit of increments, see `check`: the law of the branches, the sampler and identification.

    - calibrated: norms; independence of increments from what is read and from each other; tails; strengths of layers
      against each other; gains and temperatures that are assumed; χ² of all increments. A misfit fails if it is
      significant at `LEVEL`, for all tests together, and larger than its threshold.
    - converged and identified: as of other fits.

    Declared strengths that differ are notes: they are the question of a fit, not a defect.
    """
    fitted = _Fitted(post)
    table = summarise(post)
    names = identified_of(post)
    verdicts = [
        *fitted.norms(),
        *_independence(post),
        fitted.tails(),
        *fitted.shapes(),
        *([] if fitted.by_layer else [fitted.layers()]),
        fitted.spread(),
    ]
    of_sampler, rough = sampler_verdicts(post, table.loc[names])
    obeyed = all(verdict.passed for verdict in verdicts)
    contracted, unidentified = of_contractions(post, names if obeyed else [])
    verdicts += [*of_sampler, *contracted]
    known = [name for name in names if name not in unidentified]
    return Check(
        tuple(verdicts),
        identified=tuple(with_precision(name, table) for name in known),
        unidentified=unidentified,
        notes=tuple([*fitted.declared(table, names), *rough]),
        assumed=tuple(fitted.unconfirmed()) if obeyed else (),
    )


class _Fitted:
    """Sums of the log densities of branches, at `_centre`."""

    def __init__(self, post: xr.DataTree):
        self.post = post
        found = post["coefficients"].to_dataset()
        self.log_factors = found["log_factor"].values
        self.at_one = len(self.log_factors) // 2
        self.parts = found["part"].values
        self.names = list(dict.fromkeys(self.parts))
        self.coefficients = found["log_density"].values
        self.tokens = post["observed_data"].sizes["token_a"]
        self.means = _centre(post) | {name: np.asarray(value) for name, value in fixed_of(post).items()}
        self.by_layer = any(value.ndim for value in self.means.values())

    def norms(self) -> list[Verdict]:
        """Mean squares of what branches read after a norm."""
        normed = str(self.post.attrs.get("normed", "")).split()
        if self.post.attrs.get("reads") != "branch" or not normed:
            return []
        own = np.flatnonzero(np.isin(self.parts, normed))
        squares = np.diagonal(self.post["constant_data"].to_dataset()["input"].values[:, own], axis1=-2, axis2=-1)
        worst = own[np.unravel_index(np.abs(squares - 1).argmax(), squares.shape)[1]]
        value = np.abs(squares - 1).max()
        advice = f"branch {worst} ({self.parts[worst]}) reads tokens that are not normalised: is a norm left out?"
        return [at_most("calibrated", "mean squares after norms, less 1", value, UNNORMED, advice)]

    def tails(self) -> Verdict:
        """Fourth moments of the increments over those of normals."""
        observed = self.post["observed_data"].to_dataset()
        null = np.array([kurtosis_of_normals(self.tokens, int(n)) for n in observed["width"].values])
        of_branch = (observed["kurtosis"].values - null[:, :1]).mean(0)
        worst = int(np.abs(of_branch).argmax())
        # Cumulants of a mean over networks.
        count, sd = len(null), np.sqrt(np.square(null[:, 1]).sum()) / len(null)
        skewness = (null[:, 2] * null[:, 1] ** 3).sum() / (count * sd) ** 3
        p = stats.pearson3(skewness, scale=sd).sf(of_branch[worst]) * len(of_branch)
        value = of_branch[worst] if p < LEVEL / TESTS else 0.0
        advice = f"increments of branch {worst} ({self.parts[worst]}) have outlying features, as in a trained network"
        return at_most("calibrated", "fourth moments, excess", value, KURTOSIS, advice)

    def layers(self) -> Verdict:
        """Strengths of single layers against those of all."""
        found = []
        for name in self.names:
            own = np.flatnonzero(self.parts == name)
            at = self._at_means(name)[:, own].sum(0)
            each, sd = -at[:, 1] / at[:, 2] / 2, np.sqrt(-1 / (2 * at[:, 2]))
            z = (each - 2 * np.log(self.means[f"{name}.strength"])) / sd
            found += list(zip(own, np.exp(each / 2) / self.means[f"{name}.strength"], sd / 2, z, strict=True))
        count = len(found)
        large = [
            (branch, ratio, sd) for branch, ratio, sd, z in found if 2 * stats.norm.sf(abs(z)) * count < LEVEL / TESTS
        ]
        large.sort(key=lambda each: -abs(np.log(each[1])))
        value = max((float(np.exp(abs(np.log(ratio)))) for _, ratio, _ in large), default=1.0)
        listed = ", ".join(
            f"{self.parts[b]} of branch {b}: {ratio:.3g} ± {ratio * sd:.1g}" for b, ratio, sd in large[:3]
        )
        more = f" and {len(large) - 3} more" if len(large) > 3 else ""
        advice = f"strengths differ between layers, in units of the common one {listed}{more}; fit models.every_branch"
        return at_most("calibrated", "largest ratio of a layer's strength", value, ALIKE, advice)

    def shapes(self) -> list[Verdict]:
        """Assumed gains and temperatures against what the increments of single branches prefer."""
        found = []
        for name, best, _, gain in self._profiles:
            significant = stats.chi2.sf(2 * gain, 1) < LEVEL / TESTS
            value = np.exp(abs(best)) if significant else 1.0
            advice = (
                f"the increments prefer {np.exp(best):.2g} times the assumed {name}: give it a prior, or look for a "
                "factor in the weights of the first projections"
            )
            found.append(at_most("calibrated", f"ratio of {name} to the assumed one", value, RESHAPED, advice))
        return found

    def unconfirmed(self) -> list[str]:
        """The assumed gains and temperatures of which twice or half the value is as likely."""
        found = []
        for name, _, profile, _ in self._profiles:
            at = np.interp([-np.log(2), np.log(2)], self.log_factors, profile) - profile[self.at_one]
            if 2 * -at.max() < stats.chi2.isf(LEVEL, 1):
                found.append(name)
        return found

    @functools.cached_property
    def _profiles(self) -> list[tuple[str, float, np.ndarray, float]]:
        """For each assumed shape its best log factor, the profile of the log likelihood, and what the best gains.

        The strength of each branch is integrated out, so that layers that differ do not count; at its largest instead,
        one number for each of many branches, the likelihood would prefer gains of a wide law.
        """
        shapes = [str(name).removeprefix("declared_") for name in self.post.attrs if str(name).startswith("declared_")]
        found = []
        for name in shapes:
            part, _, own = name.rpartition(".")
            if own == "strength" or name in self.means:
                continue
            profile = scale_free(self.coefficients[:, self.parts == part].sum(0)).sum(0)
            best = int(profile.argmax())
            found.append((name, float(self.log_factors[best]), profile, float(profile[best] - profile[self.at_one])))
        return found

    def spread(self) -> Verdict:
        """χ² of all increments over its degrees of freedom."""
        total, count = 0.0, 0
        for name in self.names:
            own = np.flatnonzero(self.parts == name)
            at = self._at_means(name)[:, own]
            log_factor = 2 * np.log(np.broadcast_to(self._strengths(name), len(own)))
            total += -2 * (at[..., 0] + at[..., 1] * log_factor + at[..., 2] * log_factor**2).sum()
            count += at[..., 0].size
        freedom = count * self.tokens * (self.tokens + 1) // 2 - sum(np.size(self._strengths(n)) for n in self.names)
        p = 2 * min(stats.chi2.sf(total, freedom), stats.chi2.cdf(total, freedom))
        value = abs(total / freedom - 1) if p < LEVEL / TESTS else 0.0
        word = "more" if total > freedom else "less"
        advice = (
            f"increments spread {word} than by the law, χ²/df is {total / freedom:.2f}: not these blocks, or not at "
            "initialisation"
        )
        return at_most("calibrated", "χ² over degrees of freedom, less 1", value, SPREAD, advice)

    def declared(self, table: pd.DataFrame, names: list[str]) -> list[str]:
        """Notes on strengths that differ from the declared ones."""
        notes = []
        for name in names:
            own = name.partition("[")[0]
            declared = self.post.attrs.get(f"declared_{own}")
            if declared is None or not own.endswith("strength"):
                continue
            ratio, error = table.loc[name, "mean"] / declared, table.loc[name, "sd"] / declared
            if abs(ratio - 1) > 4 * error:
                notes.append(f"{name} is {ratio:.3g} ± {error:.1g} times the declared {declared:.3g}")
        return notes

    def _strengths(self, name: str) -> np.ndarray:
        of_layer = self.means.get(f"{name}.layer_strength")
        return self.means[f"{name}.strength"] if of_layer is None else of_layer

    def _at_means(self, name: str) -> Float[np.ndarray, "networks branches 4"]:
        """Coefficients at the block's gain or temperature."""
        for own, value in self.means.items():
            part, _, parameter = own.rpartition(".")
            if part == name and f"declared_{own}" in self.post.attrs and parameter != "strength":
                log_factor = float(np.log(value / self.post.attrs[f"declared_{own}"]))
                return np.asarray(interpolated(self.coefficients, log_factor))
        return self.coefficients[:, :, self.at_one]


def _centre(post: xr.DataTree) -> dict[str, np.ndarray]:
    """The posterior means; with a latent gain or temperature the draw of the largest likelihood.

    Strength and gain lie along a curve where the branch is nearly linear, and their means do not.
    """
    draws = post["posterior"].to_dataset()
    if all(str(name).endswith(("strength", "strength_sd")) for name in draws.data_vars):
        return {str(name): values.values for name, values in draws.mean(("chain", "draw")).data_vars.items()}
    likelihood = post["log_likelihood"].to_dataset()["increments"].sum(("network", "branch"))
    best = draws.isel(likelihood.argmax(("chain", "draw")))
    return {str(name): values.values for name, values in best.data_vars.items()}


def _independence(post: xr.DataTree) -> list[Verdict]:
    """Whether increments are independent of what is read, and of each other."""
    found = []
    observed, read = post["observed_data"].to_dataset(), post["constant_data"].to_dataset()
    parts = post["coefficients"].to_dataset()["part"].values
    if len(parts) > 1:
        worst = dependence_of_pairs(observed)
        b, c = worst.where
        advice = (
            f"increments of branches {b} ({parts[b]}) and {c} ({parts[c]}) are correlated: shared, tied or copied "
            "weights, or a trained network"
        )
        found.append(_of_dependence("share of an increment in another branch's", worst, advice))
    worst = dependence_on_input(observed, read)
    advice = (
        f"increments of branch {worst.where[0]} ({parts[worst.where[0]]}) depend on what it reads, as in a trained "
        "network, or with an identity in the branch"
    )
    found.append(_of_dependence("share of an increment in its input", worst, advice))
    # Dependence of one kind causes some of the other.
    return sorted(found, key=lambda verdict: -verdict.value)


def _of_dependence(name: str, worst: Dependence, advice: str) -> Verdict:
    value = worst.share if worst.p < LEVEL / TESTS else 0.0
    return at_most("calibrated", name, value, CORRELATED, advice)
