"""The parameters of layers, each declared once: name, symbol, meaning, coordinate on the real line, default prior.

A layer declares its parameters as fields, `gamma: Float[Array, ""] = GAMMA.field()`. Everything that needs a name, a
coordinate or a prior asks the layer: models, the mode, the range rule, the adjustment, summaries, plots and designs.

| parameter | prior | reason |
|---|---|---|
| γ | Uniform(0, 1) | all of its range |
| τ0 | LogNormal(0, 1) | a scale: 0.14 to 7 with 95 % |
| c₊, c₋ | independent N(0, 2²), then ordered c₊ ≥ c₋ | their exchange leaves the law of V unchanged at every width |

The limit depends on c₊ and c₋ through the gap c₊ − c₋ alone, and networks of one width n through q = δ²/(s̄² + δ²)
alone, with s̄ and δ half the sum and half the difference of the slopes 1 + c±/√n. The gap and the mean of two ordered
independent normals are independent: |N(0, 8)| and N(0, 2). They are sampled; c₊ and c₋ follow from them.
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
from jaxtyping import Array, ArrayLike, Float

from sdeinfer._files import InputError
from sdeinfer.covariance import is_concrete

SLOPE_SCALE = 2.0
"""Prior standard deviation of c₊ and c₋."""


@dataclasses.dataclass(frozen=True)
class Bijection:
    """From the range of a parameter to the real line.

    Attributes:
        to_real: the map; takes NumPy's namespace or JAX's, and values.
        from_real: its inverse.
        above: values must exceed this.
        most: values must not exceed this.
    """

    to_real: Callable[[Any, Any], Any]
    from_real: Callable[[Any, Any], Any]
    above: float = -math.inf
    most: float = math.inf

    @property
    def range(self) -> str:
        """The range in words."""
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
"""By their names; the range of "logit" includes 1, where its value is +∞."""


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """A scalar parameter of a layer, or a coordinate by which parameters are sampled.

    Attributes:
        name: public name: of the layer's field, of the NumPyro site, in files and on the command line.
        symbol: in plots and reports.
        meaning: in a few words.
        bijection: from its range to the real line: "logit", "log" or "identity", see `BIJECTIONS`.
        prior: a function that makes the default prior; None for a parameter without one.
        identified: whether the limit depends on it. Others are sampled, but not judged.
        of: for a parameter that follows from sampled coordinates, the rule.
    """

    name: str
    symbol: str
    meaning: str
    bijection: Literal["logit", "log", "identity"] = "identity"
    prior: Callable[[], Any] | None = None
    identified: bool = True
    of: "Reparameterisation | None" = None

    def field(self, **options: Any) -> Any:
        """A dataclass field of a layer that holds this parameter; `options` are those of `equinox.field`.

        With `default=None` the layer may do without it; None is no parameter then.
        """
        optional = options.get("default", ...) is None
        convert = (lambda value: None if value is None else self.checked(value)) if optional else self.checked
        return eqx.field(converter=convert, metadata={"parameter": self}, **options)

    def checked(self, value: ArrayLike) -> Array:
        """Convert a value to an array in JAX's default floating-point type, or refuse it.

        Traced values cannot be looked at and pass; `check_parameters` checks them where they are used.

        Arguments:
            value: a real scalar, or one for each network.

        Raises:
            InputError: for a value that is not real, or out of range.
        """
        array = jnp.asarray(value)
        if not jnp.issubdtype(array.dtype, jnp.number) or jnp.iscomplexobj(array):
            raise InputError(f"{self.name}: a real scalar is needed, got {value!r}")
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

    def is_faulty[T: (Array, np.ndarray)](self, value: T) -> T:
        """Whether values are out of range; NaN is."""
        bijection = BIJECTIONS[self.bijection]
        # NaN compares as false.
        inside = (value > bijection.above) & (value <= bijection.most) & (abs(value) < math.inf)
        return ~inside  # pyright: ignore[reportReturnType]

    def to_real(self, value: ArrayLike) -> Any:
        """The coordinate on the real line; of NumPy arrays, by NumPy."""
        return BIJECTIONS[self.bijection].to_real(_namespace(value), value)

    def from_real(self, u: ArrayLike) -> Any:
        """The value at a coordinate; of NumPy arrays, by NumPy."""
        return BIJECTIONS[self.bijection].from_real(_namespace(u), u)


@dataclasses.dataclass(frozen=True, eq=False)
class Reparameterisation:
    """Parameters of a layer that follow from other, sampled ones.

    Attributes:
        parameters: names of the layer's parameters.
        sampled: the sampled ones.
        to_sampled: from the values of the former to those of the latter.
        from_sampled: its inverse.
    """

    parameters: tuple[str, ...]
    sampled: tuple[Parameter, ...]
    to_sampled: Callable[..., tuple[Any, ...]]
    from_sampled: Callable[..., tuple[Any, ...]]


def _distributions() -> Any:
    """NumPyro's distributions, imported when the first prior is made: layers alone do without NumPyro."""
    return importlib.import_module("numpyro").distributions


GAMMA = Parameter("gamma", "γ", "strength of the residual branch", "logit", lambda: _distributions().Uniform(0, 1))
TAU0 = Parameter("tau0", "τ0", "constant of the softmax temperature", "log", lambda: _distributions().LogNormal(0, 1))
C_GAP = Parameter(
    "c_gap", "c₊ − c₋", "gap of the slopes", "log", lambda: _distributions().HalfNormal(math.sqrt(2) * SLOPE_SCALE)
)
C_MEAN = Parameter(
    "c_mean",
    "(c₊ + c₋)/2",
    "mean of the slopes",
    "identity",
    lambda: _distributions().Normal(0, SLOPE_SCALE / math.sqrt(2)),
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
"""Of the package's own parameters."""


class Coordinates:
    """The sampled coordinates of a layer, and the parameters that follow from them.

    Attributes:
        declared: the layer's parameters by their names, in its order.
        sampled: the coordinates that are sampled, by the names of their sites.
        rules: names of parameters, of the coordinates that they follow from, and how; None where they are the same.
    """

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
                names = tuple(prefix + own for own in parameter.of.parameters)
                self.rules.append((names, tuple(sampled), parameter.of))

    def __len__(self) -> int:
        return len(self.sampled)

    @property
    def identified(self) -> tuple[str, ...]:
        """Sampled coordinates that the limit depends on."""
        return tuple(name for name, parameter in self.sampled.items() if parameter.identified)

    @property
    def temperatures(self) -> tuple[str, ...]:
        """Names of the softmax temperatures τ0."""
        return tuple(name for name, parameter in self.declared.items() if parameter is TAU0)

    def to_sampled(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the sampled coordinates at a layer's parameters."""
        found = {}
        for names, sampled, rule in self.rules:
            values = tuple(parameters[name] for name in names)
            found |= dict(zip(sampled, values if rule is None else rule.to_sampled(*values), strict=True))
        return found

    def from_sampled(self, sampled: Mapping[str, Any]) -> dict[str, Any]:
        """A layer's parameters at values of the sampled coordinates."""
        found = {}
        for names, coordinates, rule in self.rules:
            values = tuple(sampled[name] for name in coordinates)
            found |= dict(zip(names, values if rule is None else rule.from_sampled(*values), strict=True))
        return {name: found[name] for name in self.declared}

    def unconstrained(self, parameters: Mapping[str, ArrayLike]) -> Float[Any, "coordinates ..."]:
        """The sampled coordinates on the real line, such as logit γ, log τ0, log(c₊ − c₋) and (c₊ + c₋)/2, stacked.

        By NumPy for NumPy's arrays and numbers; all values have one shape.
        """
        xp = _namespace(*parameters.values())
        given = {name: xp.asarray(value, float) for name, value in parameters.items()}
        sampled = self.to_sampled(given)
        return xp.stack(xp.broadcast_arrays(*(p.to_real(sampled[name]) for name, p in self.sampled.items())))

    def constrained(self, u: Float[Any, "coordinates ..."]) -> dict[str, Any]:
        """The layer's parameters at real coordinates; by NumPy for a NumPy array."""
        return self.from_sampled({name: p.from_real(x) for (name, p), x in zip(self.sampled.items(), u, strict=True)})


def _namespace(*values: Any) -> Any:
    """NumPy for its arrays and for numbers, JAX's for arrays that JAX has made or traces."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np
