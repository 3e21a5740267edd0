"""``python -m daemons`` is the ``kakeya`` command."""

import sys

from daemons.entry import main

if __name__ == "__main__":
    sys.exit(main())
