"""Figures of samples and of a fit, on Matplotlib axes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
