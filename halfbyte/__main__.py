"""`python -m halfbyte`: the command line."""

import sys

from halfbyte.cli import console

sys.exit(console())
