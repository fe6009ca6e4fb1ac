"""NumPyro programs, one per kind of data."""

from sdeinfer.models.branches import branches as branches  # pyright: ignore[reportMissingImports]
from sdeinfer.models.branches import branches_over_depth as branches_over_depth  # pyright: ignore[reportMissingImports]
from sdeinfer.models.branches import every_branch as every_branch  # pyright: ignore[reportMissingImports]
from sdeinfer.models.full_path import full_path as full_path  # pyright: ignore[reportMissingImports]
from sdeinfer.models.hierarchical import hierarchical as hierarchical  # pyright: ignore[reportMissingImports]
from sdeinfer.models.latent import outputs as outputs  # pyright: ignore[reportMissingImports]
from sdeinfer.models.latent import terminal as terminal  # pyright: ignore[reportMissingImports]
from sdeinfer.models.latent import thinned_path as thinned_path  # pyright: ignore[reportMissingImports]

from sdeinfer.likelihood._model import each_network as each_network
