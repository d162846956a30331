"""One line around a PyTorch ``DataLoader``: batches arrive on the device while the device is busy."""

from prefetch._errors import PrefetchError, PrefetchWarning
from prefetch._host import HostCopier, HostFuture, to_host
from prefetch._prefetcher import CUDAPrefetcher
from prefetch._registered import register_batch_type

__all__ = [
    "CUDAPrefetcher",
    "HostCopier",
    "HostFuture",
    "PrefetchError",
    "PrefetchWarning",
    "register_batch_type",
    "to_host",
]

__version__ = "0.1.0"
