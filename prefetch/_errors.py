"""What the library raises and warns with.

Bad arguments are ``TypeError`` and ``ValueError``; an accelerator that is not there is a ``RuntimeError``. The
library's own:

    RuntimeError
      PrefetchError       a batch that cannot be rebuilt on the device
    UserWarning
      PrefetchWarning     the result is right, but slower than it needs to be
"""


class PrefetchError(RuntimeError):
    """Root of the errors that belong to this library and to nothing else."""

    __module__ = "prefetch"


class PrefetchWarning(UserWarning):
    """The batches are right, but they arrive more slowly than they could; the text names the remedy."""

    __module__ = "prefetch"
