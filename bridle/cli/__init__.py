"""The `bridle` command. `main` is its entry point; `app` holds the tree of commands, one module each.

Modules here import nothing heavy at their top: `bridle --help` must not wait for torch.
"""

from bridle.cli.run import main

__all__ = ["main"]
