"""Shaped blocks as modules that train: `sdeinfer.modules.torch` for PyTorch, `sdeinfer.modules.flax` for Flax nnx."""
