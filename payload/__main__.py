"""``python -m payload COMMAND``."""

import sys

from payload.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
