"""Mean-field self-attention: tokens on the sphere that cluster, and β inferred."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
