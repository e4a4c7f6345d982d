"""``python -m ragged_attention``: what is here and what it can run; ``demo`` runs both operations."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
