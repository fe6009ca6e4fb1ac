"""The order in which a fit is checked: its own tests, the sampler, what the data identify, and the truth."""

import xarray as xr

from sdeinfer._arguments import checked
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.diagnostics._own import tests_of_branches, tests_of_covariances, tests_of_scores
from sdeinfer.diagnostics._posterior import FittedPosterior, with_chains
from sdeinfer.diagnostics._summary import (
    constants_of,
    identified_of,
    of_chains,
    of_geometry,
    of_rough,
    of_truth,
    summarise,
    with_precision,
)
from sdeinfer.diagnostics._verdict import Check
from sdeinfer.infer._assume import placed
from sdeinfer.layers import AbstractLayer


@checked
@with_progress_line
@placed
def check(
    post: xr.DataTree,
    data: xr.Dataset | None = None,
    *,
    architecture: AbstractLayer | type[AbstractLayer] | None = None,
    progress: bool = True,
) -> Check:
    """Check a fit: convergence, identification, calibration, agreement with the theory, and the truth if known.

    - calibrated: the one-step innovations in eight directions (`innovation_tests`), if every layer was observed. A
      misfit fails if it is significant and moves a parameter by more than `MOVE` posterior standard deviations (see
      `consequences`), or if it is larger than `EFFECT`; others are notes. The false-alarm probability of each test is
      `LEVEL`, for all directions together. The noise of each layer against that of all. γ against that by the
      regression of hidden states on those before, if these were observed. With latent layers, each network given all
      others (`left_out_transforms`).
    - architecture: other architectures and sizes by their evidence, see `alternatives`.
    - agrees with the theory: what the law omits, by its consequences; the range of the law; with latent layers, also
      networks after the last layer against predictions.
    - converged: R-hat, effective sample sizes, divergences and BFMI.
    - identified: the contraction of each posterior from its prior, or the contraction expected from the Fisher
      information if that is less; see `identification`. Left out if the layers do not obey the law.
    - true: each parameter against the truth, if known.

    Of increments of residual branches, calibrated means: norms, independence of what is read and of other branches,
    fourth moments, assumed gains and temperatures, strengths of layers against each other, and χ². Where gains,
    temperatures or χ² fail, the verdict "evidence for another block" names what the network may have in place of the
    declared block: another norm, factor or mask (`AbstractBranch.alternatives`). Of tokens: score tests of their law.

    Arguments:
        post: the result of `fit`.
        data: the data that were fitted, to be compared with those in the posterior, which are checked: the transitions
            that the fit used; some of the networks for data in chunks (Dask), with a note.
        architecture: the layer, for a custom type of layer, which the posterior does not store.
        progress: whether a line on a terminal or in a notebook says what is done, after two seconds.

    Returns:
        The verdicts, each with value, threshold and advice; and the skipped tests.

    Raises:
        InputError: for data that were not fitted.
    """
    del progress  # for `with_progress_line`
    phase("checking the fit")
    tree = with_chains(post)
    table, names = summarise(tree), identified_of(tree)
    if "coefficients" in tree.children:
        tests = tests_of_branches(tree, table)
    elif "score_tests" in tree.children:
        tests = tests_of_scores(tree)
    else:
        tests = tests_of_covariances(FittedPosterior.of(tree, data, architecture), table["sd"].to_dict())
    sampled = table.drop(index=[*constants_of(tree)], errors="ignore")
    obeyed = all(verdict.passed for verdict in tests.verdicts)
    contractions = tests.contractions if obeyed else {}
    unidentified = [name for name, contraction in contractions.items() if not contraction.passed]
    known = [with_precision(name, table) for name in names if name not in unidentified]
    # The first τ0 that the data do not identify; values out of the law's range make the others depend on its prior.
    unknown = [name for name in unidentified if name in tests.beyond][:1]
    beyond = [tests.beyond[name] for name in unknown]
    conditional = [name for name in unknown if known and not tests.beyond[name].passed]
    verdicts = [
        *tests.verdicts,
        *of_chains(sampled),
        *contractions.values(),
        *beyond,
        *of_geometry(tree),
        *tests.last,
        *of_truth(table.loc[names]),
    ]
    return Check(
        tuple(verdicts),
        skipped=(*tests.skipped, *_skipped(tree)),
        identified=() if conditional else tuple(known),
        conditional=f"{', '.join(known)} by the prior of {conditional[0]}" if conditional else "",
        unidentified=tuple(unidentified),
        notes=(*tests.notes, *of_rough(sampled), *(tests.beyond[name].advice for name in conditional)),
        assumed=tests.assumed if known else {},
    )


def _skipped(post: xr.DataTree) -> list[str]:
    """The tests of the sampler that cannot be made, with reasons."""
    if "sample_stats" in post.children:
        tests = {"diverging": "divergences", "energy": "BFMI"}
        missing = [name for name in tests if name not in post["sample_stats"].data_vars]
        skipped = [f"{tests[name]}: the sampler has no statistic {name}" for name in missing]
    else:
        skipped = ["divergences and energies: there is no group sample_stats"]
    if post["posterior"].sizes["chain"] == 1:
        skipped.append("agreement of chains: there is one, and R-hat compares its halves; run two chains or more")
    return skipped
