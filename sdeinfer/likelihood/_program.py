"""A NumPyro program together with the preparation of its data."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import xarray as xr

from sdeinfer.likelihood._transitions import Path


@dataclasses.dataclass(frozen=True)
class Program:
    """A NumPyro model, callable as one, that says how to prepare its data.

    Attributes:
        model: the model; its first argument is the prepared data, everything else is passed by keyword.
        prepare: reduces a Dataset of covariances to what the model needs, once, outside the sampler.
        pool: reduces prepared data further to what the joint density needs, which may know less of each network.
        blocks: cuts prepared data into parts with the networks of each, all of one shape, and how many of them count.
        path: the transitions that the model is a law of, so that its data can be expanded about the mode; None for a
            model of something else.
        select: the part of a Dataset that the model looks at.
        latent: the site of the latent layers, standard normals in a plate whose elements are independent given all
            other sites; None where nothing but parameters is latent.
        alike: of networks in groups, the program of networks that are all alike: by it each group's range and expansion
            are found. None for a program whose networks are.
        acceptance: the mean acceptance that NUTS adapts its step to.
        options: what is passed by keyword: the architecture and the law.
    """

    model: Callable[..., None]
    prepare: Callable[[xr.Dataset], Any]
    pool: Callable[[Any], Any]
    path: Callable[[xr.Dataset], Path] | None = None
    blocks: Callable[[Any], Iterable[tuple[Any, int | None]]] = lambda prepared: [(prepared, None)]
    select: Callable[[xr.Dataset], xr.Dataset] = lambda data: data
    latent: str | None = None
    alike: "Program | None" = None
    acceptance: float = 0.8
    options: tuple[tuple[str, Any], ...] = ()

    def given(self, **options: Any) -> "Program":
        """The same program with its options fixed."""
        alike = None if self.alike is None else self.alike.given(**options)
        return dataclasses.replace(self, alike=alike, options=tuple((dict(self.options) | options).items()))

    def __call__(self, prepared: Any, **options: Any) -> None:
        """Run the model, as NumPyro does."""
        self.model(prepared, **(dict(self.options) | options))

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.__name__


def observing(
    prepare: Callable[[xr.Dataset], Any],
    pool: Callable[[Any], Any] = lambda prepared: prepared,
    blocks: Callable[[Any], Iterable[tuple[Any, int | None]]] = lambda prepared: [(prepared, None)],
    path: Callable[[xr.Dataset], Path] | None = None,
    select: Callable[[xr.Dataset], xr.Dataset] = lambda data: data,
    latent: str | None = None,
    alike: Program | None = None,
    acceptance: float = 0.8,
) -> Callable[[Callable[..., None]], Program]:
    """Decorate a NumPyro model with the preparation of its data."""
    return lambda model: Program(model, prepare, pool, path, blocks, select, latent, alike, acceptance)
