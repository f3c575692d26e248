"""Errors that a user can fix: printed as one line with key, value and remedy, exit code 2."""


class UserError(Exception):
    """Base class of every error that the command line prints without a traceback."""


class ConfigError(UserError):
    """A setting is unknown, impossible, or conflicts with another one."""


class DataError(UserError):
    """Text, shards or a tokenizer are missing, damaged or do not belong together."""


class RunError(UserError):
    """A run directory cannot be started, resumed or read."""
