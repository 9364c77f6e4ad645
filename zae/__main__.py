"""`python -m zae`: the commands of `zae.cli`."""

from __future__ import annotations

import sys

from zae.cli import main

if __name__ == "__main__":
    sys.exit(main())
