"""The `bridle` command. `main` is the command's entry point; `app` holds the tree of subcommands, one module each.

Modules of this package import no heavy package at their top, because `bridle --help` must not wait for torch.
"""

from bridle.cli.run import main

__all__ = ["main"]
