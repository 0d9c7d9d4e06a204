"""Infrastructure, independent of the method: processes, signals, files, pictures, the judge.

Nothing here imports from the repository's root.
"""


class InputError(ValueError):
    """The run cannot start or continue. The message names the bad value and a remedy.

    Programs print it without a traceback.
    """
