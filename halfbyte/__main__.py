"""`python -m halfbyte`: the command line."""

import sys

from halfbyte.cli import main

sys.exit(main())
