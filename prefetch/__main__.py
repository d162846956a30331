"""The command ``cuda-prefetcher``, as ``python -m prefetch``."""

from __future__ import annotations

import sys

from prefetch.cli import main

if __name__ == "__main__":  # worker processes of the user's loader may import this module again
    sys.exit(main())
