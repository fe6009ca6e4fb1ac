"""The order in which a fit is checked: its own tests, the sampler, what the data identify, and the truth."""

import xarray as xr

from sdeinfer._arguments import checked
from sdeinfer.diagnostics._advice import OUT_OF_RANGE
from sdeinfer.diagnostics._covariances import FittedCovariances
from sdeinfer.diagnostics._own import COEFFICIENTS, SCORE_TESTS, AbstractFitted, FittedBranches, FittedScores
from sdeinfer.diagnostics._posterior import Posterior, with_chains
from sdeinfer.diagnostics._sampler import CONTRACTED, of_chains, of_geometry, of_rough, of_truth, with_precision
from sdeinfer.diagnostics._summary import constants_of
from sdeinfer.diagnostics._verdict import Check
from sdeinfer.infer._placed import placed
from sdeinfer.layers import AbstractLayer


@checked
@placed
def check(
    post: xr.DataTree,
    data: xr.Dataset | None = None,
    *,
    architecture: AbstractLayer | type[AbstractLayer] | None = None,
) -> Check:
    """Check a fit: convergence, identification, calibration, agreement with the theory, and the truth if known.

    - calibrated: the one-step innovations in eight directions (`innovation_tests`), if every layer was observed. A
      misfit fails if it is significant and moves a parameter by more than `MOVE` posterior standard deviations (see
      `consequences`), or if it is larger than `EFFECT`; others are reported as notes. The false-alarm probability of
      each test is `LEVEL`, for all directions together. With latent layers, each network given all others
      (`left_out_transforms`). First of all, a tight prior that contradicts the data is named.
    - architecture: other architectures and sizes by their evidence, see `alternatives`.
    - agrees with the theory: what the law omits, by its consequences; the range of the law; with latent layers, also
      networks after the last layer against the SDE.
    - converged: R-hat, effective sample sizes, divergences and BFMI.
    - identified: the contraction of each posterior from its prior, or the contraction expected from the Fisher
      information if that is less; see `identification`. A parameter that is not identified is no defect of a fit. Left
      out if the layers do not obey the law.
    - true: each parameter against the truth, if known.

    Of increments of residual branches, calibrated means: norms, independence of what is read and of other branches,
    fourth moments, assumed gains and temperatures, strengths of layers against each other, and χ². Strengths that
    differ from the declared ones are notes. Of tokens: score tests of their law in some directions, of which a misfit
    fails by the same rule as innovations.

    No check of a solver's step is needed for latent layers: they are the layers of the networks, not solver steps.

    Arguments:
        post: the result of `fit`.
        data: the data that were fitted, to be compared with those in the posterior, which are checked: the transitions
            that the fit used; of data in chunks (Dask) some of the networks, which a note says.
        architecture: the layer, for a custom type of layer, which the posterior does not store.

    Returns:
        The verdicts, each with value, threshold and advice; and the skipped tests.

    Raises:
        InputError: for data that were not fitted.
    """
    fitted = _fitted(post, data, architecture)
    table, names, own = fitted.table, fitted.identified, fitted.tests()
    sampled = table.drop(index=[*constants_of(fitted.tree)], errors="ignore")
    obeyed = all(verdict.passed for verdict in own.verdicts)
    contractions = own.contractions if obeyed else []
    unidentified = [each.name.removesuffix(CONTRACTED) for each in contractions if not each.passed]
    unknown = [own.beyond[name] for name in unidentified if name in own.beyond][:1]
    verdicts = [
        *own.verdicts,
        *of_chains(sampled),
        *contractions,
        *unknown,
        *of_geometry(fitted.tree),
        *own.last,
        *of_truth(table.loc[names]),
    ]
    known = tuple(with_precision(name, table) for name in names if name not in unidentified)
    conditional = [each.name.removesuffix(OUT_OF_RANGE) for each in unknown if not each.passed]
    return Check(
        tuple(verdicts),
        skipped=(*own.skipped, *_skipped(fitted.tree)),
        identified=() if conditional else known,
        conditional=f"only by the prior of {conditional[0]}: {', '.join(known)}" if conditional else "",
        unidentified=tuple(unidentified),
        notes=(*own.notes, *of_rough(sampled), *(each.advice for each in unknown if not each.passed)),
        assumed=tuple(own.assumed) if known else (),
    )


def _fitted(
    post: xr.DataTree,
    data: xr.Dataset | None,
    architecture: AbstractLayer | type[AbstractLayer] | None,
) -> AbstractFitted:
    """A fit, by the kind of data that was fitted."""
    if COEFFICIENTS in post.children:
        return FittedBranches(with_chains(post))
    if SCORE_TESTS in post.children:
        return FittedScores(with_chains(post))
    posterior = Posterior.of(post, data, architecture)
    return FittedCovariances(posterior.tree, posterior)


def _skipped(post: xr.DataTree) -> list[str]:
    """The tests of the sampler that cannot be made, with reasons."""
    skipped = []
    if "sample_stats" not in post.children:
        skipped.append("divergences and energies: there is no group sample_stats")
    if post["posterior"].sizes["chain"] == 1:
        skipped.append("agreement of chains: there is one, and R-hat compares its halves; run two chains or more")
    return skipped
