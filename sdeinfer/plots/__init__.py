"""Figures of a fit or an agreement study, as matplotlib figures."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
