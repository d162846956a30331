"""One line around a PyTorch ``DataLoader``: batches arrive on the device while the device is busy."""

from prefetch._errors import PrefetchError, PrefetchWarning
from prefetch._prefetcher import CUDAPrefetcher

__all__ = ["CUDAPrefetcher", "PrefetchError", "PrefetchWarning"]

__version__ = "0.1.0"
