"""`python -m tfdist` becomes the `tfdist` command; nothing is decided here."""

import sys

from tfdist.cli import main

if __name__ == "__main__":
    sys.exit(main())
