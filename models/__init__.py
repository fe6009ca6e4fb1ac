"""NumPyro programs, one per kind of data."""

from sdeinfer.models.full_path import full_path as full_path  # pyright: ignore[reportMissingImports]
