"""A NumPyro program together with the preparation of its data."""

import dataclasses
from collections.abc import Callable
from typing import Any

import xarray as xr


@dataclasses.dataclass(frozen=True)
class Program:
    """A NumPyro model, callable as one, that says how to prepare its data.

    Attributes:
        model: the model; its first argument is the prepared data, `architecture` is passed by keyword.
        prepare: reduces a Dataset of covariances to what the model needs, once, outside the sampler.
    """

    model: Callable[..., None]
    prepare: Callable[[xr.Dataset], Any]

    def __call__(self, prepared: Any, *, architecture: str) -> None:
        """Run the model, as NumPyro does."""
        self.model(prepared, architecture=architecture)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.__name__


def observing(prepare: Callable[[xr.Dataset], Any]) -> Callable[[Callable[..., None]], Program]:
    """Decorate a NumPyro model with the preparation of its data."""
    return lambda model: Program(model, prepare)
