"""The command line, and the only folder that knows every wing: composition happens here.

Each command imports its wing inside, so that `greylag --help` answers at once. A SpecError becomes one line and
exit code 2.
"""

from greylag.cli.commands import main

__all__ = ["main"]
