"""Tests of observed increments against the law of their blocks. Tests: `tests/models/test_branches.py`."""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy import stats

from sdeinfer.blocks._alternatives import evidence_of_others
from sdeinfer.blocks._attributes import BLOCKS, stack_in
from sdeinfer.blocks._coefficients import interpolated
from sdeinfer.blocks._information import scale_free
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.diagnostics._dependence import Dependence, dependence_of_pairs, dependence_on_input, kurtosis_of_normals
from sdeinfer.diagnostics._thresholds import (
    ALIKE,
    CHI_SQUARES,
    CORRELATED,
    EVIDENCE,
    KURTOSIS,
    LEVEL,
    RESHAPED,
    UNNORMED,
)
from sdeinfer.diagnostics._verdict import Verdict, at_most

OF_OTHERS = "share of an increment in another branch's"
"""Name of the test of independence of branches."""


class BranchTests:
    """Tests of increments, at values of the blocks' parameters: a misfit fails if significant and above its threshold.

    Arguments:
        data: a Dataset of branches.
        coefficients: its log densities, see `blocks.labelled`.
        values: strengths of blocks or of their layers, and gains and temperatures that are not the declared ones.
        declared: values of the blocks that `coefficients` are of.
        normed: names of the blocks that read tokens after a norm.
    """

    level = LEVEL / 7  # of each of seven tests

    def __init__(
        self,
        data: xr.Dataset,
        coefficients: xr.Dataset,
        *,
        values: Mapping[str, np.ndarray],
        declared: Mapping[str, float],
        normed: Sequence[str] = (),
    ):
        self.data = data
        self.values, self.declared, self.normed = values, declared, normed
        self.log_factors = coefficients["log_factor"].values
        self.at_one = len(self.log_factors) // 2
        self.parts = coefficients["part"].values
        self.names = list(dict.fromkeys(self.parts))
        self.coefficients = coefficients["log_density"].values
        self.tokens = data.sizes["token_a"]
        self.by_layer = any(np.ndim(value) for value in values.values())

    def verdicts(self) -> list[Verdict]:
        """All tests, causes before consequences."""
        of_increments = [*self.norms(), *self.independence(), self.tails()]
        of_shapes, of_layers, of_spread = self.shapes(), [] if self.by_layer else [self.layers()], self.spread()
        of_blocks = [*of_shapes, *of_layers, of_spread]
        # Strengths that differ between layers spread the increments, too.
        explained = not all(verdict.passed for verdict in [*of_increments, *of_layers])
        if explained or all(verdict.passed for verdict in of_blocks):
            return [*of_increments, *of_blocks]
        alternatives, gains = self.alternatives(), [gain for *_, gain in self._profiles]
        # Another temperature explains as much as a missing factor of the logits does.
        if alternatives and alternatives[0].value <= max(gains, default=0.0):
            return [*of_increments, *of_shapes, *alternatives, *of_layers, of_spread]
        return [*of_increments, *alternatives, *of_blocks]

    def norms(self) -> list[Verdict]:
        """Mean squares of what branches read after a norm."""
        if self.data.attrs.get("reads") != "branch" or not self.normed:
            return []
        branches = np.flatnonzero(np.isin(self.parts, self.normed))
        squares = np.diagonal(self.data["input"].values[:, branches], axis1=-2, axis2=-1)
        worst = branches[np.unravel_index(np.abs(squares - 1).argmax(), squares.shape)[1]]
        value = np.abs(squares - 1).max()
        advice = f"branch {worst} ({self.parts[worst]}) reads tokens that are not normalised: is a norm left out?"
        return [at_most("calibrated", "mean squares after norms, less 1", value, UNNORMED, advice)]

    def independence(self) -> list[Verdict]:
        """Whether increments are independent of what is read, and of each other."""
        verdicts, parts = [], self.parts
        if len(parts) > 1:
            pairs = dependence_of_pairs(self.data)
            (b, c), *_ = pairs.worst
            advice = (
                f"increments of branches {b} ({parts[b]}) and {c} ({parts[c]}) are correlated: shared, tied or copied "
                "weights, or a trained network"
            )
            verdicts.append(self._of_dependence(OF_OTHERS, pairs, advice))
        on_input = dependence_on_input(self.data)
        (worst,), *_ = on_input.worst
        advice = (
            f"increments of branch {worst} ({parts[worst]}) depend on what it reads, as in a trained network, or with "
            "an identity in the branch"
        )
        verdicts.append(self._of_dependence("share of an increment in its input", on_input, advice))
        # Dependence of one kind causes some of the other.
        return sorted(verdicts, key=lambda verdict: -verdict.value)

    def _of_dependence(self, name: str, dependence: Dependence, advice: str) -> Verdict:
        _, share, p = dependence.worst
        return at_most("calibrated", name, share if p < self.level else 0.0, CORRELATED, advice)

    def tails(self) -> Verdict:
        """Fourth moments of the increments over those of normals."""
        null = np.array([kurtosis_of_normals(self.tokens, int(n)) for n in self.data["width"].values])
        of_branch = (self.data["kurtosis"].values - null[:, :1]).mean(0)
        worst = int(np.abs(of_branch).argmax())
        # Cumulants of a mean over networks.
        count, sd = len(null), np.sqrt(np.square(null[:, 1]).sum()) / len(null)
        skewness = (null[:, 2] * null[:, 1] ** 3).sum() / (count * sd) ** 3
        p = stats.pearson3(skewness, scale=sd).sf(of_branch[worst]) * len(of_branch)
        value = of_branch[worst] if p < self.level else 0.0
        advice = f"increments of branch {worst} ({self.parts[worst]}) have outlying features, as in a trained network"
        return at_most("calibrated", "fourth moments, excess", value, KURTOSIS, advice)

    def layers(self) -> Verdict:
        """Strengths of single layers against those of all; what differs is named by the median of the layers.

        One layer far from all others moves their common strength, from which all then differ.
        """
        value, count, large = 1.0, len(self.parts), []
        farthest = float(stats.norm.isf(self.level / count / 2))
        for name in self.names:
            branches = np.flatnonzero(self.parts == name)
            terms = self._at_values(name)[:, branches].sum(0)
            strengths, sds = -terms[:, 1] / terms[:, 2] / 4, np.sqrt(-1 / (2 * terms[:, 2])) / 2  # of log strengths
            from_common = np.abs(strengths - np.log(self.values[f"{name}.strength"]))
            differ = from_common > farthest * sds
            if not differ.any():
                continue
            value = max(value, float(np.exp(from_common[differ].max())))
            from_median = strengths - np.median(strengths)
            named = np.flatnonzero(np.abs(from_median) > farthest * sds if len(branches) > 2 else differ)
            large += [(branches[place], np.exp(from_median[place]), sds[place]) for place in named]
        large.sort(key=lambda layer: -abs(np.log(layer[1])))
        listed = ", ".join(
            f"{self.parts[b]} of branch {b}: {ratio:.3g} ± {ratio * sd:.1g}" for b, ratio, sd in large[:3]
        )
        omitted = f" and {len(large) - 3} more" if len(large) > 3 else ""
        advice = f"strengths differ between layers, in units of their median {listed}{omitted}; fit models.every_branch"
        return at_most("calibrated", "largest ratio of a layer's strength", value, ALIKE, advice)

    def shapes(self) -> list[Verdict]:
        """Assumed gains and temperatures against what the increments of single branches prefer."""
        verdicts = []
        for name, best, _, gain in self._profiles:
            significant = stats.chi2.sf(2 * gain, 1) < self.level
            value = np.exp(abs(best)) if significant else 1.0
            advice = (
                f"the increments prefer {np.exp(best):.2g} times the assumed {name}: give it a prior, or look for a "
                "factor in the weights of the first projections"
            )
            verdicts.append(at_most("calibrated", f"ratio of {name} to the assumed one", value, RESHAPED, advice))
        return verdicts

    def alternatives(self) -> list[Verdict]:
        """The block, other than the declared one, that the increments prefer most; none where blocks are not known."""
        if BLOCKS not in self.data.attrs:
            return []
        order = BlockOrder.of_data(stack_in(self.data.attrs), self.data)
        evidence = {
            (name, words): value
            for name in self.names
            for words, value in evidence_of_others(self.data, order, name, self._log_factor(name)).items()
        }
        (name, words), value = max(evidence.items(), key=lambda item: item[1], default=(("", ""), 0.0))
        advice = (
            f"{name}: a block where {words} fits better, by a log evidence of {value:.2g}: check the code, or "
            "declare that block"
        )
        return [at_most("architecture", "evidence for another block", max(value, 0.0), EVIDENCE, advice)]

    def unconfirmed(self) -> list[str]:
        """The assumed gains and temperatures of which twice or half the value is as likely."""
        names = []
        for name, _, profile, _ in self._profiles:
            changes = np.interp([-np.log(2), np.log(2)], self.log_factors, profile) - profile[self.at_one]
            if 2 * -changes.max() < stats.chi2.isf(LEVEL, 1):
                names.append(name)
        return names

    @functools.cached_property
    def _profiles(self) -> list[tuple[str, float, np.ndarray, float]]:
        """For each assumed shape its best log factor, the profile of the log likelihood, and what the best gains.

        The strength of each branch is integrated out, so that layers that differ do not count; at its largest instead,
        one number for each of many branches, the likelihood would prefer gains of a wide law.
        """
        profiles = []
        for name in self.declared:
            part, _, shape = name.rpartition(".")
            if shape == "strength" or name in self.values:
                continue
            profile = scale_free(self.coefficients[:, self.parts == part].sum(0)).sum(0)
            best = int(profile.argmax())
            profiles.append((name, float(self.log_factors[best]), profile, float(profile[best] - profile[self.at_one])))
        return profiles

    def spread(self) -> Verdict:
        """χ² of all increments over its degrees of freedom."""
        squares = self._chi_squares()
        total = float(squares.sum())
        freedom = self._freedom * squares.size - sum(np.size(self._strengths(n)) for n in self.names)
        p = 2 * min(stats.chi2.sf(total, freedom), stats.chi2.cdf(total, freedom))
        value = abs(total / freedom - 1) if p < self.level else 0.0
        word = "more" if total > freedom else "less"
        advice = (
            f"increments spread {word} than by the law, χ²/df is {total / freedom:.2f}: not these blocks, or not at "
            "initialisation"
        )
        return at_most("calibrated", "χ² over degrees of freedom, less 1", value, CHI_SQUARES, advice)

    def of_each(self) -> Float[np.ndarray, " branches"]:
        """For each branch a p-value: of its χ², and of its dependence on what it reads, by Bonferroni's bound."""
        squares = self._chi_squares()
        law = stats.chi2(self._freedom * len(squares))
        total = squares.sum(0)
        spread = 2 * np.minimum(law.sf(total), law.cdf(total))
        return np.minimum(2 * np.minimum(spread, dependence_on_input(self.data).p), 1.0)

    @property
    def _freedom(self) -> int:
        return self.tokens * (self.tokens + 1) // 2

    def _chi_squares(self) -> Float[np.ndarray, "networks branches"]:
        """χ² of each increment."""
        squares = np.empty(self.coefficients.shape[:2])
        for name in self.names:
            branches = np.flatnonzero(self.parts == name)
            terms = self._at_values(name)[:, branches]
            log_factor = 2 * np.log(np.broadcast_to(self._strengths(name), len(branches)))
            squares[:, branches] = -2 * (terms[..., 0] + terms[..., 1] * log_factor + terms[..., 2] * log_factor**2)
        return squares

    def _strengths(self, name: str) -> np.ndarray:
        of_layer = self.values.get(f"{name}.layer_strength")
        return self.values[f"{name}.strength"] if of_layer is None else of_layer

    def _at_values(self, name: str) -> Float[np.ndarray, "networks branches 4"]:
        """Coefficients at the block's gain or temperature."""
        log_factor = self._log_factor(name)
        if not log_factor:
            return self.coefficients[:, :, self.at_one]
        return np.asarray(interpolated(self.coefficients, log_factor))

    def _log_factor(self, name: str) -> float:
        """Logarithm of the block's gain or temperature over the declared one; 0 if it was not fitted."""
        for parameter, value in self.values.items():
            block, _, shape = parameter.rpartition(".")
            if block == name and parameter in self.declared and shape != "strength":
                return float(np.log(value / self.declared[parameter]))
        return 0.0
