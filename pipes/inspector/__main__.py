"""`python -m pipes.inspector`, the same as `pipes-inspect`."""

import sys

from pipes.inspector.cli import main

sys.exit(main())
