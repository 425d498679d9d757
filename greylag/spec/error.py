"""The one exception for the user's mistakes. Faults of ours are asserts, never this."""


class SpecError(ValueError):
    """Input that cannot be used: the message is one line that names the key or file and says what to do.

    The command line prints it and exits with code 2.
    """
