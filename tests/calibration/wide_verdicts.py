"""The verdict of `check` on each data set of the wide family."""

import jax.random as jr
import numpy as np
from calibration.wide_family import Family, draw_family, hidden_states

import sdeinfer as si
from sdeinfer.layers import Architecture


def observed(family: Family, seed: int):
    """The networks of a family as a Dataset, and their architecture."""
    pattern = si.Pattern(causal=family.causal, prompts=family.prompts) if family.attends else si.Pattern()
    sizes = {"heads": family.heads, "output_projection": family.output_projection, "expansion": family.expansion}
    observer = si.observation.Observer(pattern=pattern)
    with np.errstate(all="ignore"):  # some explode
        for X in hidden_states(family, seed):
            observer.add(X)
    return observer.dataset(), Architecture(family.architecture, **sizes, pattern=pattern)


def judged(seed: int) -> dict:
    """What the package says of one family: why it refuses it, or the verdict, and how far the truth is."""
    family = draw_family(seed)
    line = {"seed": seed, "architecture": family.architecture, "tokens": len(family.V0), "width": family.width}
    try:
        data, architecture = observed(family, seed)
        post = si.fit(si.models.full_path, data, architecture=architecture, key=jr.key(seed))
        check = si.check(post)
    except si.InputError as error:  # anything else is a defect
        return {**line, "refused": str(error)}
    if si.check(post, data).verdict != check.verdict:
        return {**line, "error": "check(post, data) is another verdict"}
    z = {
        name: _deviation(post["posterior"][name].values, truth, architecture.coordinates.sampled[name].to_real)
        for name, truth in family.truth.items()
    }
    in_range = "out_of_range" not in post.attrs and post.attrs["left_out"] < 0.99
    found = {"trusted": check.passed, "in_range": in_range, "verdict": check.verdict}
    return {**line, **found, "unidentified": check.unidentified, "z": z, "left_out": float(post.attrs["left_out"])}


def _deviation(draws: np.ndarray, truth: float, to_real) -> float:
    """How many standard deviations a truth is from the mean of draws, on the line where they are near normal."""
    draws, truth = np.asarray(to_real(draws)), np.asarray(to_real(np.float64(truth)))
    return float((truth - draws.mean()) / draws.std())
