"""What the library raises and warns with.

Bad arguments are ``TypeError`` and ``ValueError``; an accelerator that is not there is a ``RuntimeError``. The
library's own:

    RuntimeError
      PrefetchError       a batch that cannot be rebuilt on the device, a pass that cannot start or go on
    UserWarning
      PrefetchWarning     batches arrive more slowly than they could, or a loader is left behind at work
"""


class PrefetchError(RuntimeError):
    """Root of the errors that belong to this library and to nothing else."""

    __module__ = "prefetch"


class PrefetchWarning(UserWarning):
    """The batches are right, but something could be better; the text names it, and the remedy."""

    __module__ = "prefetch"
