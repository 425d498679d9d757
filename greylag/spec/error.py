"""The one exception for the user's mistakes. Faults of ours are asserts, never this."""


class SpecError(ValueError):
    """Input that cannot be used: the message is one line that names the key or file and says what to do.

    What a file or a key's name brings along that would not print (line breaks, escape codes) is shown as its escape.
    The command line prints the message and exits with code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))
