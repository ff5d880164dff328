"""`python -m umbel`: the command line."""

from __future__ import annotations

from umbel.cli.main import main

if __name__ == "__main__":
    main()
