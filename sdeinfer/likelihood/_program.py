"""A NumPyro program together with the preparation of its data."""

import dataclasses
from collections.abc import Callable
from typing import Any

import xarray as xr


@dataclasses.dataclass(frozen=True)
class Program:
    """A NumPyro model, callable as one, that says how to prepare its data.

    Attributes:
        model: the model; its first argument is the prepared data, everything else is passed by keyword.
        reduce: reduces a Dataset of covariances to what the model needs, once, outside the sampler; given the program,
            with its options, and the Dataset.
        pool: reduces prepared data further to what the joint density needs, which may know less of each network.
        options: what is passed by keyword: the architecture and the law.
    """

    model: Callable[..., None]
    reduce: "Callable[[Program, xr.Dataset], Any]"
    pool: Callable[[Any], Any]
    options: tuple[tuple[str, Any], ...] = ()

    def given(self, **options: Any) -> "Program":
        """The same program with its options fixed."""
        return dataclasses.replace(self, options=tuple((dict(self.options) | options).items()))

    def __call__(self, prepared: Any, **options: Any) -> None:
        """Run the model, as NumPyro does."""
        self.model(prepared, **(dict(self.options) | options))

    def prepare(self, data: xr.Dataset) -> Any:
        """All that the model needs of the data."""
        return self.reduce(self, data)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.__name__


def observing(
    reduce: Callable[[Program, xr.Dataset], Any], pool: Callable[[Any], Any] = lambda prepared: prepared
) -> Callable[[Callable[..., None]], Program]:
    """Decorate a NumPyro model with the preparation of its data."""
    return lambda model: Program(model, reduce, pool)
