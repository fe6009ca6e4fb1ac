"""Constants of a block of one width, and its arguments from a layer, for the modules of both libraries.

Constants are floats of Python, so that a program of PyTorch makes no arrays of JAX.
Tests: `tests/modules/test_modules.py`.
"""

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from sdeinfer._arguments import at_least_one, given
from sdeinfer._files import InputError
from sdeinfer.covariance import CAUSAL
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.layers import AbstractLayer, OverDepth
from sdeinfer.layers._base import check_parameters
from sdeinfer.parameters import BIJECTIONS, GAMMA, TAU0, Parameter


class OfLayer:
    """A module that has the law of a layer at initialisation."""

    layer_type: ClassVar[type[AbstractLayer]]

    @classmethod
    def of[M: "OfLayer"](cls: type[M], layer: AbstractLayer, width: int, **options: Any) -> M:
        """The module of a layer at one width."""
        if not isinstance(layer, cls.layer_type):
            hint = "; take the layer at a depth-time, layer.at(t)" if isinstance(layer, OverDepth) else ""
            raise InputError(f"layer: a {cls.layer_type.__name__} is needed, got {type(layer).__name__}{hint}")
        fields = given(**{field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)})
        fields |= {name: float(value) for name, value in check_parameters(layer).parameters().items()}
        if "pattern" in fields:
            pattern = fields.pop("pattern")
            if pattern not in (EVERY_TOKEN, CAUSAL):
                raise InputError(
                    f"pattern: modules are causal or not and take any mask with X; the layer has {pattern}"
                )
            fields["causal"] = pattern.causal
        return cls(width, **fields, **options)  # pyright: ignore[reportCallIssue]


def residual_weights(gamma: float) -> tuple[float, float]:
    """λ = √(1 − γ²) and γ."""
    gamma = _in_range(GAMMA, gamma)
    return math.sqrt((1 - gamma) * (1 + gamma)), gamma


def key_size(width: int, heads: int, key_width: int | None) -> int:
    """Width n_k of the queries and keys of one head: n/H if None."""
    at_least_one(width=width, heads=heads, **given(key_width=key_width))
    if width % heads != 0:
        raise InputError(f"heads: the width {width} is not a multiple of {heads}")
    return width // heads if key_width is None else key_width


def temperature(tau0: float, width: int, key_width: int) -> float:
    """τ0 √(n n_k), by which the products of queries and keys are divided."""
    return _in_range(TAU0, tau0) * math.sqrt(width * key_width)


def relu_slopes(c_plus: float, c_minus: float, width: int) -> tuple[float, float]:
    """Slopes √c s± of √c σ_s for positive and negative inputs: s± = 1 + c±/√n, c = 2/(s₊² + s₋²) (Eq. 4)."""
    s_plus, s_minus = 1 + float(c_plus) / math.sqrt(width), 1 + float(c_minus) / math.sqrt(width)
    he = math.sqrt(2 / (s_plus**2 + s_minus**2))
    return he * s_plus, he * s_minus


def _in_range(parameter: Parameter, value: float) -> float:
    number = np.float64(value)
    if parameter.is_faulty(number):
        raise InputError(f"{parameter.name}: must be {BIJECTIONS[parameter.bijection].range}, got {number:g}")
    return float(number)
