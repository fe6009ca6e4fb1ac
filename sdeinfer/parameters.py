"""The parameters of layers, each declared once: name, symbol, meaning, coordinate on the real line, default prior.

A layer declares its parameters as fields, `gamma: Float[Array, ""] = GAMMA.field()`. Everything that needs a name, a
coordinate or a prior asks the layer: models, the mode, the range rule, the adjustment, summaries, plots and designs.

| parameter | prior | reason |
|---|---|---|
| γ | Uniform(0, 1) | flat over its range |
| τ0 | LogNormal(0, 1) | a scale; 95 % between 0.14 and 7 |
| c₊, c₋ | independent N(0, 2²), then ordered c₊ ≥ c₋ | exchanging them leaves the law of V unchanged at every width |

The limit depends on c₊ and c₋ only through the gap c₊ − c₋; networks of one width n only through q = δ²/(s̄² + δ²),
with s̄ and δ half the sum and half the difference of the slopes 1 + c±/√n. The gap and the mean of two ordered
independent normals are independent, |N(0, 8)| and N(0, 2). The models sample these two and compute c₊ and c₋.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.covariance._matrix import engine, is_concrete


@dataclasses.dataclass(frozen=True)
class Bijection:
    """A map from the range (above, most] of a parameter to the real line, and its inverse."""

    to_real: Callable[[Any, Any], Any]
    from_real: Callable[[Any, Any], Any]
    above: float = -math.inf
    most: float = math.inf

    @property
    def range(self) -> str:
        """The range in words, for messages."""
        if math.isinf(self.above):
            return "finite"
        if math.isinf(self.most):
            return f"greater than {self.above:g} and finite"
        return f"in ({self.above:g}, {self.most:g}]"


BIJECTIONS = {
    "logit": Bijection(lambda xp, x: xp.log(x) - xp.log1p(-x), lambda xp, u: 1 / (1 + xp.exp(-u)), 0.0, 1.0),
    "log": Bijection(lambda xp, x: xp.log(x), lambda xp, u: xp.exp(u), 0.0),
    "identity": Bijection(lambda xp, x: x, lambda xp, u: u),
}
"""Bijections by name; the range of "logit" includes 1, which maps to +∞."""


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """A scalar parameter of a layer, or a sampled coordinate from which parameters are computed.

    Attributes:
        name: public name, used for the layer's field, the NumPyro site, in files and on the command line.
        symbol: symbol in plots and reports.
        meaning: short description.
        bijection: name of the map to the real line, "logit", "log" or "identity"; see `BIJECTIONS`.
        prior: function that returns the default prior; None for no default.
        identified: whether the limit depends on it. Diagnostics do not judge coordinates that are not identified.
        of: the reparameterisation, for a parameter computed from sampled coordinates.
    """

    name: str
    symbol: str
    meaning: str
    bijection: Literal["logit", "log", "identity"] = "identity"
    prior: Callable[[], Any] | None = None
    identified: bool = True
    of: "Reparameterisation | None" = None

    def field(self, **options: Any) -> Any:
        """A field of a layer that holds this parameter; `options` are passed to `equinox.field`.

        With `default=None` the field is optional; a layer whose field is None does not have this parameter.
        """
        optional = options.get("default", ...) is None
        convert = (lambda value: None if value is None else self.checked(value)) if optional else self.checked
        return eqx.field(converter=convert, metadata={"parameter": self}, **options)

    def checked(self, value: ArrayLike) -> Any:
        """Convert a value, or one for each network, to a floating-point array; check its range unless it is traced.

        NumPy arrays in a type that JAX has stay in NumPy.
        """
        host = isinstance(value, np.ndarray) and value.dtype == jax.dtypes.canonicalize_dtype(value.dtype)
        try:
            # JAX compiles a program to make an array of a Python number, but not to place one.
            number = isinstance(value, int | float)
            array: Any = value if host else jax.device_put(value) if number else jnp.asarray(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"{self.name}: a real scalar is needed, got {shown(value)}") from error
        if not jnp.issubdtype(array.dtype, jnp.number) or jnp.iscomplexobj(array):
            raise InputError(f"{self.name}: a real scalar is needed, got {shown(value)}")
        if array.ndim > 1:
            raise InputError(
                f"{self.name}: a scalar or one value for each network is needed, got the shape {array.shape}"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(float)
        if is_concrete(array):
            known = np.asarray(array)
            faulty = np.asarray(self.is_faulty(known))
            if faulty.any():
                first = np.ravel(known)[np.argmax(faulty)]
                raise InputError(f"{self.name}: must be {BIJECTIONS[self.bijection].range}, got {first:g}")
        return array

    def is_faulty(self, value: Any) -> Any:
        """Whether values are out of range; True for NaN."""
        bijection = BIJECTIONS[self.bijection]
        # Comparisons with NaN are False.
        inside = (value > bijection.above) & (value <= bijection.most) & (abs(value) < math.inf)
        return ~inside

    def to_real(self, value: ArrayLike) -> Any:
        """The coordinate on the real line; NumPy arrays stay in NumPy."""
        with np.errstate(divide="ignore"):  # an end of the range is at infinity
            return BIJECTIONS[self.bijection].to_real(engine(value), value)

    def from_real(self, u: ArrayLike) -> Any:
        """The value at a coordinate; NumPy arrays stay in NumPy."""
        return BIJECTIONS[self.bijection].from_real(engine(u), u)


@dataclasses.dataclass(frozen=True, eq=False)
class Reparameterisation:
    """Parameters of a layer computed from sampled coordinates, and the inverse."""

    parameters: tuple[str, ...]
    sampled: tuple[Parameter, ...]
    to_sampled: Callable[..., tuple[Any, ...]]
    from_sampled: Callable[..., tuple[Any, ...]]


def distributions() -> Any:
    """NumPyro's distributions, imported with the first prior so that layers do not need NumPyro."""
    return importlib.import_module("numpyro").distributions


GAMMA = Parameter("gamma", "γ", "strength of the residual branch", "logit", lambda: distributions().Uniform(0, 1))
TAU0 = Parameter("tau0", "τ0", "constant of the softmax temperature", "log", lambda: distributions().LogNormal(0, 1))
C_GAP = Parameter("c_gap", "c₊ − c₋", "gap of the slopes", "log", lambda: distributions().HalfNormal(math.sqrt(8)))
C_MEAN = Parameter(
    "c_mean",
    "(c₊ + c₋)/2",
    "mean of the slopes",
    "identity",
    lambda: distributions().Normal(0, math.sqrt(2)),
    identified=False,
)
SLOPES = Reparameterisation(
    ("c_plus", "c_minus"),
    (C_GAP, C_MEAN),
    lambda plus, minus: (plus - minus, (plus + minus) / 2),
    lambda gap, mean: (mean + gap / 2, mean - gap / 2),
)
C_PLUS = Parameter("c_plus", "c₊", "slope 1 + c₊/√n of positive inputs", of=SLOPES)
C_MINUS = Parameter("c_minus", "c₋", "slope 1 + c₋/√n of negative inputs", of=SLOPES)

SYMBOLS = {parameter.name: parameter.symbol for parameter in (GAMMA, TAU0, C_GAP, C_PLUS, C_MINUS)}
"""Symbols of the package's parameters by name."""


class Coordinates:
    """The sampled coordinates of a layer by site name, and the rules by which its parameters are computed from them."""

    def __init__(self, declared: Mapping[str, Parameter]):
        self.declared = dict(declared)
        self.sampled: dict[str, Parameter] = {}
        self.rules: list[tuple[tuple[str, ...], tuple[str, ...], Reparameterisation | None]] = []
        for name, parameter in self.declared.items():
            prefix = name.removesuffix(parameter.name)
            if parameter.of is None:
                self.sampled[name] = parameter
                self.rules.append(((name,), (name,), None))
                continue
            sampled = {prefix + coordinate.name: coordinate for coordinate in parameter.of.sampled}
            if not sampled.keys() <= self.sampled.keys():
                self.sampled |= sampled
                names = tuple(prefix + suffix for suffix in parameter.of.parameters)
                self.rules.append((names, tuple(sampled), parameter.of))

    def __len__(self) -> int:
        return len(self.sampled)

    def __repr__(self) -> str:
        return f"Coordinates({', '.join(self.sampled)})"

    @property
    def identified(self) -> tuple[str, ...]:
        """Names of the sampled coordinates on which the limit depends."""
        return tuple(name for name, parameter in self.sampled.items() if parameter.identified)

    @property
    def temperatures(self) -> tuple[str, ...]:
        """Names of the softmax temperatures τ0."""
        return tuple(name for name, parameter in self.declared.items() if parameter is TAU0)

    def to_sampled(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the sampled coordinates at the layer's parameters."""
        coordinates = {}
        for names, sampled, rule in self.rules:
            values = tuple(parameters[name] for name in names)
            coordinates |= dict(zip(sampled, values if rule is None else rule.to_sampled(*values), strict=True))
        return coordinates

    def from_sampled(self, sampled: Mapping[str, Any]) -> dict[str, Any]:
        """The layer's parameters at values of the sampled coordinates."""
        parameters = {}
        for names, coordinates, rule in self.rules:
            values = tuple(sampled[name] for name in coordinates)
            parameters |= dict(zip(names, values if rule is None else rule.from_sampled(*values), strict=True))
        return {name: parameters[name] for name in self.declared}

    def unconstrained(self, parameters: Mapping[str, Any]) -> Float[Any, "coordinates ..."]:
        """The sampled coordinates on the real line, such as logit γ, log τ0, log(c₊ − c₋) and (c₊ + c₋)/2, stacked.

        Values must have broadcastable shapes. NumPy arrays and Python numbers stay in NumPy.
        """
        xp = engine(*parameters.values())
        given = {name: xp.asarray(value, float) for name, value in parameters.items()}
        sampled = self.to_sampled(given)
        return xp.stack(xp.broadcast_arrays(*(p.to_real(sampled[name]) for name, p in self.sampled.items())))

    def constrained(self, u: Float[Any, "coordinates ..."]) -> dict[str, Any]:
        """The layer's parameters at real coordinates; NumPy arrays stay in NumPy."""
        return self.from_sampled({name: p.from_real(x) for (name, p), x in zip(self.sampled.items(), u, strict=True)})
