"""The exceptions of Headroom."""

from __future__ import annotations


class Error(RuntimeError):
    """The base of all errors of Headroom. The message says what is wrong, where, and what to do.

    ``code`` is the kind of error: ``"invalid argument"``, ``"mismatch"``, ``"wrong order"`` and so on.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code

    # Pickling passes both arguments to the constructor; the default would pass the message only.
    def __reduce__(self) -> tuple[type[Error], tuple[str, str]]:
        return type(self), (str(self), self.code)


class InvalidArgument(Error, ValueError):
    """A value that is never valid, or two that do not fit together."""


def make(code: str, message: str) -> Error:
    """The exception for a code of the core; the extension module calls this."""
    kind = InvalidArgument if code in ("invalid argument", "mismatch") else Error
    return kind(message, code)
