"""The command line as `python -m encoder_service`."""

import sys

from encoder_service.cli import main

if __name__ == "__main__":
    sys.exit(main())
