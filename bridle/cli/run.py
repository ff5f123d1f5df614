"""From words on a command line to an exit code.

A mistake of the user is one line on stderr and exit code 2; a failure of something else is one line and code
1; a bug of ours keeps its traceback. Ctrl-C is 130, as shells expect.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import CycloptsError

from bridle.errors import BridleError, InternalError, InvalidRequest, UnsupportedModel

MISUSE = 2
FAILURE = 1
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (default: those of the process) name; gives the exit code."""
    from bridle.cli.app import app

    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = app(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return _complain(f"{error} (see: {_help_hint(words)})", MISUSE)
    except (InvalidRequest, UnsupportedModel) as error:
        return _complain(str(error), MISUSE)
    except InternalError:
        raise
    except BridleError as error:
        return _complain(str(error), FAILURE)
    except BrokenPipeError:  # the reader of a pipe, `head` for one, has seen enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _complain(message: str, code: int) -> int:
    print(f"bridle: {' '.join(message.split())}", file=sys.stderr)
    return code


def _help_hint(words: Sequence[str]) -> str:
    """The help page nearest to what was typed."""
    from bridle.cli.app import app

    command = words[0] if words and words[0] in app else ""
    return " ".join(filter(None, ["bridle", command, "--help"]))
