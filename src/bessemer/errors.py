"""The ways a command ends other than well. Each carries one line for the person: what, where, what to do."""


class BessemerError(Exception):
    """Something failed; the message says what, where and what to do. Exit code 1."""

    exit_code = 1


class InputError(BessemerError):
    """What the person gave cannot be used: recipe, arguments, sources. Exit code 2."""

    exit_code = 2


class TooFewIds(InputError):
    """A text of which no vocabulary as large as asked for can be made; supported: the largest that can."""

    def __init__(self, message: str, supported: int) -> None:
        super().__init__(message)
        self.supported = supported


class Stopped(BessemerError):
    """Stopped on request; the same command goes on from here. Exit code 75 (EX_TEMPFAIL: a scheduler may requeue)."""

    exit_code = 75
