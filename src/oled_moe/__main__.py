"""`python -m oled_moe` is the command line."""

import sys

from oled_moe.cli import main

if __name__ == "__main__":
    sys.exit(main())
