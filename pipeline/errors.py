"""Errors that a person caused and can mend: one line with key, value and remedy, exit code 2, never a traceback."""


class UserError(Exception):
    """Base of every error that the command line prints as one line."""


class ConfigError(UserError):
    """A setting is unknown, impossible, or clashes with another."""


class DataError(UserError):
    """Text, shards or a tokenizer are missing, corrupt or do not belong together."""


class RunError(UserError):
    """A run directory cannot be started, continued or read as asked."""
