"""`python -m mega`, which is also how torchrun starts every rank."""

import sys

from mega.cli import main

if __name__ == "__main__":
    sys.exit(main())
