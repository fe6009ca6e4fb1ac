"""Figures on Matplotlib axes: of samples, fits, tuned layers and audits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
