"""What a fit leaves for people and machines: a page, its figures, and a summary in numbers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
