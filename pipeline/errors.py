"""Errors that a user can fix: printed as one line with key, value and remedy, exit code 2."""


class UserError(Exception):
    """Base class of every error that the command line prints without a traceback."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error of a library, or its type if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class ConfigError(UserError):
    """A setting is unknown, impossible, or conflicts with another one."""


class DataError(UserError):
    """Text, shards or a tokenizer are missing, damaged or do not belong together."""


class RunError(UserError):
    """A run directory cannot be started, resumed or read."""
