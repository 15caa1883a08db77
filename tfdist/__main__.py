"""Entry point of `python -m tfdist`."""

import sys

from tfdist.cli import main

if __name__ == "__main__":
    sys.exit(main())
