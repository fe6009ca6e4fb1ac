"""Values made from flags: a key, an architecture, sampled networks, and the model of the data."""

from typing import TYPE_CHECKING, Any

import sdeinfer as si

if TYPE_CHECKING:
    import jax
    import xarray as xr

    from sdeinfer.likelihood import AbstractModel


def key_of(seed: int, part: int) -> "jax.Array":
    """The PRNG key of one part of a command."""
    import jax

    return jax.random.fold_in(jax.random.key(seed), part)


def kind_of(
    attrs: dict,
    name: str | None,
    heads: int | None,
    output_projection: bool | None,  # noqa: FBT001
    expansion: float | None,
    causal: bool | None,  # noqa: FBT001
    prompts: int | None,
    tokens: int,
) -> "si.Architecture":
    """The architecture from the flags; the data's attributes supply what the flags leave out.

    `tokens` is the number of all tokens, of all prompts together.

    Raises:
        InputError: if neither names an architecture, and for sizes that it does not have.
    """
    if name is None or name == attrs.get("architecture"):
        kind = si.layers.architecture_in(attrs) or (None if name is None else si.Architecture(name))
        if kind is None:
            raise si.InputError(f"--architecture: the data do not name one; give {', '.join(si.layers.ARCHITECTURES)}")
    else:
        kind = si.Architecture(name)
    if "pattern" in kind.sizes:
        kind = kind.with_sizes(pattern=pattern_of(attrs, causal, prompts, tokens))
    elif causal:
        raise si.InputError(f"--causal: {kind.name} has none")
    flags = {"heads": heads, "output_projection": output_projection, "expansion": expansion}
    given = {flag: value for flag, value in flags.items() if value is not None}
    for size in given:
        if size not in kind.sizes:
            raise si.InputError(f"--{size.replace('_', '-')}: {kind.name} has none")
    return kind.with_sizes(**given)


def pattern_of(
    attrs: dict,
    causal: bool | None,  # noqa: FBT001
    prompts: int | None,
    tokens: int,
) -> "si.Pattern":
    """The attention pattern from the flags and the data's attributes."""
    pattern = si.Pattern.in_attributes(attrs)
    if causal is None and prompts is None:
        return pattern
    if prompts is not None and tokens % prompts:
        raise si.InputError(f"--prompts: {tokens} tokens are not {prompts} prompts of equal length")
    lengths = pattern.prompts if prompts is None else (tokens // prompts,) * prompts
    return si.Pattern(causal=pattern.causal if causal is None else causal, prompts=lengths)


def fixed_by(flags: list[str] | None) -> dict[str, float]:
    """The coordinates that `--fix NAME=NUMBER` fixes, and their values."""
    fixed = {}
    for flag in flags or []:
        name, _, value = flag.partition("=")
        try:
            fixed[name] = float(value)
        except ValueError:
            raise si.InputError(f"--fix: NAME=NUMBER is needed, as in tau0=1; got {flag!r}") from None
    return fixed


def bounds_by(flags: list[str] | None) -> dict[str, tuple[float, float]]:
    """The ranges that `--bound NAME=LOW:HIGH` sets."""
    bounds = {}
    for flag in flags or []:
        name, _, value = flag.partition("=")
        try:
            low, high = map(float, value.split(":"))
        except ValueError:
            raise si.InputError(f"--bound: NAME=LOW:HIGH is needed, as in gamma=0.1:0.9; got {flag!r}") from None
        bounds[name] = (low, high)
    return bounds


def sampled(
    layer: "si.layers.AbstractLayer",
    V0: "jax.Array",
    sizes: dict[str, Any],
    observe_every: str,
    outputs: int,
    seed: int,
    *,
    first: int = 0,
    progress: bool = True,
) -> "xr.Dataset":
    """Sample networks, from one of a number on, and observe them as `--observe-every` says."""
    every = observed_every(observe_every, sizes["depth"])
    # Single precision halves the run time; its rounding is a millionth of a layer's noise.
    V0 = V0.astype("float32")
    sizes = sizes | {"observe_every": every, "first_network": first}
    data = si.sample_networks(layer, V0, **sizes, progress=progress, key=key_of(seed, 0))
    if observe_every == "outputs":
        data = si.sample_outputs(data, outputs=outputs, key=key_of(seed, 2))
    return data


def observed_every(observe_every: str, depth: int) -> int:
    """The number of layers from one observed layer to the next."""
    return depth if observe_every in ("last", "outputs") else _whole(observe_every)


def _whole(observe_every: str) -> int:
    if not observe_every.isdecimal():
        raise si.InputError(f"--observe-every: a whole number, `last` or `outputs` is needed, got {observe_every!r}")
    return int(observe_every)


def model_of(data: "xr.Dataset") -> "AbstractModel":
    """The model that fits the data: of outputs, of every layer, or of some layers."""
    from sdeinfer.models import full_path, outputs, thinned_path
    from sdeinfer.observation import outputs_of

    if outputs_of(data):
        return outputs
    return full_path if (data["layer"].diff("layer") == 1).all() else thinned_path
