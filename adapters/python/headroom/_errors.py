"""The exceptions that Headroom raises."""

from __future__ import annotations


class Error(RuntimeError):
    """Every error of Headroom: one sentence that says what is wrong, where, and what to do.

    ``code`` names its kind: ``"invalid argument"``, ``"mismatch"``, ``"wrong order"`` and so on.
    """

    def __init__(self, sentence: str, code: str) -> None:
        super().__init__(sentence)
        self.code = code

    def __reduce__(self) -> tuple[type[Error], tuple[str, str]]:
        return type(self), (str(self), self.code)


class InvalidArgument(Error, ValueError):
    """A value that can never work, or two that do not fit."""


def make(code: str, sentence: str) -> Error:
    kind = InvalidArgument if code in ("invalid argument", "mismatch") else Error
    return kind(sentence, code)
