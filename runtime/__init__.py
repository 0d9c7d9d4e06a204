"""Infrastructure, independent of the method: processes, signals, files, pictures, answers.

May import only runtime, nothing from the repository's root.
"""


class InputError(ValueError):
    """The run cannot start or continue. The message names the bad value and a remedy.

    Programs print it without a traceback.
    """


class NotFiniteError(FloatingPointError):
    """Logits, a loss or a gradient are not finite, so a run cannot continue."""


def in_words(error: Exception) -> str:
    """What an exception says, in one line: a ValueError of ours, or whatever a library raises."""
    said = " ".join(str(error).split())[:400]
    return said if type(error) is ValueError else f"{type(error).__name__}: {said}"
