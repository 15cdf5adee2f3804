"""The two ways a command of ours can end without a result: the input was bad, or the measurement failed."""


class UsageError(ValueError):
    """Bad input. The message is one line: what is wrong, where, and how to mend it. The command line exits with 2."""


class MeasurementError(RuntimeError):
    """The question was sound but could not be measured (an engine died, too few tokens). The command line exits with 3."""
