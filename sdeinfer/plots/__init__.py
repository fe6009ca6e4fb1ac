"""Figures of a fit; each function takes the result of `fit` and returns a matplotlib figure."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
