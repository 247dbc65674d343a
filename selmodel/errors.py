"""The one error type for faults that the user can mend."""

from __future__ import annotations


class UserError(Exception):
    """A wrong option, file or combination of both.

    The message names the option or file, its value, what was expected and one way out. The command
    line prints the message alone, without a traceback, and exits with status 2.
    """
