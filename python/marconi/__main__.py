"""`python -m marconi` is the `marconi` command."""

import sys

from marconi.cli import main

sys.exit(main())
