"""Priors of the parameters, and the architectures made of them.

| parameter | prior | why |
|---|---|---|
| γ | Uniform(0, 1) | all of its range |
| τ0 | LogNormal(0, 1) | a scale: 0.14 to 7 with 95 % |
| c₊, c₋ | independent N(0, 2²), then ordered c₊ ≥ c₋ | their exchange leaves the law of V unchanged at every width |

Of c₊ and c₋ the limit knows only the gap c₊ − c₋, and networks of one width n only q = δ²/(s̄² + δ²), s̄ and δ half the
sum and half the difference of the slopes 1 + c±/√n. The gap and the mean of two ordered independent normals are
independent: |N(0, 8)| and N(0, 2). They are what is sampled; c₊ and c₋ follow from them.
"""

import math

import numpyro
import numpyro.distributions as dist
from jaxtyping import ArrayLike

from sdeinfer.layers import AbstractLayer, Architecture

SLOPE_SCALE = 2.0


def sample_layer(architecture: Architecture) -> AbstractLayer:
    """Draw the layer of an architecture from its prior; the sites carry the parameters' public names."""
    return architecture.layer(**sample_parameters(architecture))


def sample_parameters(architecture: Architecture) -> dict[str, ArrayLike]:
    """Draw the parameters of an architecture."""
    parameters: dict[str, ArrayLike] = {}
    if "gamma" in architecture.parameters:
        parameters["gamma"] = sample_gamma()
    if "tau0" in architecture.parameters:
        parameters["tau0"] = sample_tau0()
    if "c_plus" in architecture.parameters:
        parameters["c_plus"], parameters["c_minus"] = sample_slopes()
    return parameters


def sample_gamma() -> ArrayLike:
    """γ, the strength of the residual branch."""
    return numpyro.sample("gamma", dist.Uniform(0, 1))


def sample_tau0() -> ArrayLike:
    """τ0, the constant of the softmax temperature."""
    return numpyro.sample("tau0", dist.LogNormal(0, 1))


def sample_slopes() -> tuple[ArrayLike, ArrayLike]:
    """c₊ ≥ c₋, by way of their gap and their mean."""
    gap = numpyro.sample("c_gap", dist.HalfNormal(math.sqrt(2) * SLOPE_SCALE))
    mean = numpyro.sample("c_mean", dist.Normal(0, SLOPE_SCALE / math.sqrt(2)))
    return numpyro.deterministic("c_plus", mean + gap / 2), numpyro.deterministic("c_minus", mean - gap / 2)
