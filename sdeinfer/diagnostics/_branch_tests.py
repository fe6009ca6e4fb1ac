"""Tests of increments of branches against the law of their blocks. Tests: `tests/models/test_branches.py`."""

import dataclasses
import functools

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float
from scipy import stats

from sdeinfer.blocks._alternatives import evidence_of_others
from sdeinfer.blocks._attributes import BLOCKS, stack_in
from sdeinfer.blocks._coefficients import interpolated
from sdeinfer.blocks._information import scale_free
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.diagnostics import _thresholds as bounds
from sdeinfer.diagnostics._dependence import Dependence, dependence_of_pairs, dependence_on_input, kurtosis_of_normals
from sdeinfer.diagnostics._summary import fixed_of, identified_of
from sdeinfer.diagnostics._verdict import Check, Verdict, at_most, if_significant, together
from sdeinfer.observation._networks import MEASURED


def check_increments(tree: xr.DataTree, table: pd.DataFrame) -> Check:
    """The verdicts on increments; strengths unlike the declared ones are notes, not defects."""
    tests, notes = BranchTests(tree), []
    of_law = tests.of_law()
    for name in identified_of(tree):
        site = name.partition("[")[0]
        if site not in tests.declared or not site.endswith("strength"):
            continue
        ratio, error = table.loc[name, ["mean", "sd"]] / tests.declared[site]
        if abs(ratio - 1) > bounds.LARGEST_DEVIATION * error:
            notes.append(f"{name} is {ratio:.3g} ± {error:.1g} times the declared {tests.declared[site]:.3g}")
    # Gains and temperatures that were read from the weights need no confirmation.
    unknown = tests.unconfirmed() if of_law.passed and MEASURED not in tree.attrs else []
    return dataclasses.replace(of_law, notes=tuple(notes), assumed=dict.fromkeys(unknown, ""))


def centre(tree: xr.DataTree) -> dict[str, np.ndarray]:
    """The posterior means; with a latent gain or temperature the draw of the largest likelihood.

    Strength and gain lie along a curve where the branch is nearly linear, and their means do not.
    """
    draws = tree["posterior"].to_dataset()
    if all(str(name).endswith(("strength", "strength_sd")) for name in draws.data_vars):
        values = draws.mean(("chain", "draw"))
    else:
        likelihood = tree["log_likelihood"].to_dataset()["increments"].sum(("network", "branch"))
        values = draws.isel(likelihood.argmax(("chain", "draw")))
    return {str(name): variable.values for name, variable in values.data_vars.items()}


class BranchTests:
    """Tests of increments at the centre of a posterior: a misfit fails if significant and above its threshold."""

    def __init__(self, tree: xr.DataTree):
        self.data = xr.merge([tree["observed_data"].to_dataset(), tree["constant_data"].to_dataset()])
        self.data = self.data.assign_attrs(tree.attrs)
        # Strengths of blocks or of their layers, and gains and temperatures that are not the declared ones.
        self.values = centre(tree) | {name: np.asarray(x) for name, x in fixed_of(tree).items()}
        attrs, prefix = {str(name): value for name, value in tree.attrs.items()}, "declared_"
        self.declared = {name.removeprefix(prefix): float(x) for name, x in attrs.items() if name.startswith(prefix)}
        coefficients = tree["coefficients"].to_dataset()
        self.log_factors, self.parts = coefficients["log_factor"].values, coefficients["part"].values
        self.coefficients = coefficients["log_density"].values  # see `blocks.labelled`
        self.at_one = len(self.log_factors) // 2
        self.names = list(dict.fromkeys(self.parts))
        self.tokens = self.data.sizes["token_a"]

    def of_law(self) -> Check:
        """All tests, causes before consequences."""
        increments = together([self.norms(), self.independence(), self.tails()])
        shapes, layers, spread = self.shapes(), self.layers(), self.spread()
        blocks = together([shapes, layers, spread])
        # Strengths that differ between layers spread the increments, too.
        if blocks.passed or not (increments.passed and layers.passed):
            return together([increments, blocks])
        others, gain = self.alternatives(), max((gains.max() for gains in self.profiles.values()), default=0.0)
        # Another temperature explains as much as a missing factor of the logits does.
        explained = any(verdict.value <= gain for verdict in others.verdicts)
        first, second = (shapes, others) if explained else (others, shapes)
        return together([increments, first, second, layers, spread])

    def norms(self) -> Check:
        """Mean squares of what branches read after a norm."""
        branches = np.flatnonzero(np.isin(self.parts, str(self.data.attrs.get("normed", "")).split()))
        if self.data.attrs.get("reads") != "branch" or not len(branches):
            return Check()
        away = np.abs(np.diagonal(self.data["input"].values[:, branches], axis1=-2, axis2=-1) - 1)
        worst = branches[np.unravel_index(away.argmax(), away.shape)[1]]
        advice = f"branch {worst} ({self.parts[worst]}) reads tokens that are not normalised: is a norm left out?"
        return Check(
            (at_most("calibrated", "mean squares after norms, less 1", away.max(), bounds.NORM_ERROR, advice),)
        )

    def independence(self) -> Check:
        """Whether increments are independent of what is read, and of each other."""
        verdicts, parts = [], self.parts
        if len(parts) > 1:
            pairs = dependence_of_pairs(self.data)
            b, c = pairs.where
            advice = (
                f"increments of branches {b} ({parts[b]}) and {c} ({parts[c]}) are correlated: shared, tied or copied "
                "weights, or a trained network"
            )
            verdicts.append(_of_dependence("share of an increment in another branch's", pairs, advice))
        on_input = dependence_on_input(self.data)
        (b,) = on_input.where
        advice = (
            f"increments of branch {b} ({parts[b]}) depend on what it reads, as in a trained network, or with an "
            "identity in the branch"
        )
        verdicts.append(_of_dependence("share of an increment in its input", on_input, advice))
        # Dependence of one kind causes some of the other.
        return Check(tuple(sorted(verdicts, key=lambda verdict: -verdict.value)))

    def tails(self) -> Check:
        """Fourth moments of the increments over those of normals."""
        null = np.array([kurtosis_of_normals(self.tokens, int(n)) for n in self.data["width"].values])
        of_branch = (self.data["kurtosis"].values - null[:, :1]).mean(0)
        worst = int(np.abs(of_branch).argmax())
        # Cumulants of a mean over networks.
        count, sd = len(null), np.sqrt(np.square(null[:, 1]).sum()) / len(null)
        skewness = (null[:, 2] * null[:, 1] ** 3).sum() / (count * sd) ** 3
        p = stats.pearson3(skewness, scale=sd).sf(of_branch[worst]) * len(of_branch)
        value = if_significant(of_branch[worst], p, bounds.BRANCH_LEVEL)
        advice = f"increments of branch {worst} ({self.parts[worst]}) have outlying features, as in a trained network"
        return Check((at_most("calibrated", "fourth moments, excess", value, bounds.EXCESS_KURTOSIS, advice),))

    def layers(self) -> Check:
        """Strengths of single layers against those of all, if these are common; the median names what differs.

        One layer far from all others moves their common strength, from which all then differ.
        """
        if any(np.ndim(value) for value in self.values.values()):
            return Check()
        value, large = 1.0, []
        farthest = float(stats.norm.isf(bounds.BRANCH_LEVEL / len(self.parts) / 2))
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
        words = [f"{self.parts[b]} of branch {b}: {ratio:.3g} ± {ratio * sd:.1g}" for b, ratio, sd in large]
        omitted = f" and {len(words) - bounds.NAMED_LAYERS} more" if len(words) > bounds.NAMED_LAYERS else ""
        listed = ", ".join(words[: bounds.NAMED_LAYERS]) + omitted
        advice = f"strengths differ between layers, in units of their median {listed}; fit models.every_branch"
        return Check(
            (at_most("calibrated", "largest ratio of a layer's strength", value, bounds.STRENGTH_RATIO, advice),)
        )

    def shapes(self) -> Check:
        """Assumed gains and temperatures against what the increments of single branches prefer."""
        verdicts = []
        for name, gains in self.profiles.items():
            best = self.log_factors[gains.argmax()]
            p = stats.chi2.sf(2 * gains.max(), 1)
            value = if_significant(np.exp(abs(best)), p, bounds.BRANCH_LEVEL, null=1.0)
            advice = (
                f"the increments prefer {np.exp(best):.2g} times the assumed {name}: give it a prior, or look for a "
                "factor in the weights of the first projections"
            )
            row = f"ratio of {name} to the assumed one"
            verdicts.append(at_most("calibrated", row, value, bounds.SHAPE_RATIO, advice))
        return Check(tuple(verdicts))

    def alternatives(self) -> Check:
        """The block, other than the declared one, that the increments prefer most; none where blocks are not known."""
        if BLOCKS not in self.data.attrs:
            return Check()
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
        value = max(value, 0.0)
        return Check((at_most("architecture", "evidence for another block", value, bounds.EVIDENCE, advice),))

    def spread(self) -> Check:
        """χ² of all increments over its degrees of freedom."""
        squares = np.empty(self.coefficients.shape[:2])
        freedom = self.tokens * (self.tokens + 1) // 2 * squares.size
        for name in self.names:
            branches, of_layers = np.flatnonzero(self.parts == name), self.values.get(f"{name}.layer_strength")
            strengths = self.values[f"{name}.strength"] if of_layers is None else of_layers
            terms, x = self._at_values(name)[:, branches], 2 * np.log(np.broadcast_to(strengths, len(branches)))
            squares[:, branches] = -2 * (terms[..., 0] + terms[..., 1] * x + terms[..., 2] * x**2)
            freedom -= np.size(strengths)
        total = float(squares.sum())
        p = 2 * min(stats.chi2.sf(total, freedom), stats.chi2.cdf(total, freedom))
        value = if_significant(abs(total / freedom - 1), p, bounds.BRANCH_LEVEL)
        word = "more" if total > freedom else "less"
        advice = (
            f"increments spread {word} than by the law, χ²/df is {total / freedom:.2f}: not these blocks, or not at "
            "initialisation"
        )
        return Check(
            (at_most("calibrated", "χ² over degrees of freedom, less 1", value, bounds.CHI_SQUARE_DISTANCE, advice),)
        )

    def unconfirmed(self) -> list[str]:
        """The assumed gains and temperatures of which twice or half the value is as likely."""
        ends, least = np.log([0.5, 2.0]), stats.chi2.isf(bounds.LEVEL, 1)
        changes = {name: np.interp(ends, self.log_factors, gains).max() for name, gains in self.profiles.items()}
        return [name for name, change in changes.items() if -2 * change < least]

    @functools.cached_property
    def profiles(self) -> dict[str, Float[np.ndarray, " factors"]]:
        """The gain of the log likelihood by a factor of each assumed gain or temperature.

        The strength of each branch is integrated out, so that layers that differ do not count; at its largest instead,
        one number for each of many branches, the likelihood would prefer gains of a wide law.
        """
        profiles = {}
        for name in self.declared:
            part, _, shape = name.rpartition(".")
            if shape != "strength" and name not in self.values:
                profile = scale_free(self.coefficients[:, self.parts == part].sum(0)).sum(0)
                profiles[name] = profile - profile[self.at_one]
        return profiles

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


def _of_dependence(name: str, dependence: Dependence, advice: str) -> Verdict:
    share = if_significant(dependence.share, dependence.p, bounds.BRANCH_LEVEL)
    return at_most("calibrated", name, share, bounds.EXPLAINED_SHARE, advice)
