"""Reports of a fit and of a tuning: an HTML page with its figures; of a fit a summary in JSON too."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
