"""Exceptions. Each says what the command line would."""

from __future__ import annotations


class Error(Exception):
    """Something that moeflux refuses, or that went wrong in it."""


class FileError(Error, OSError):
    """A file cannot be opened, read or written."""


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file."""


class CheckpointError(Error, ValueError):
    """A checkpoint, tokenizer, chat template or session file cannot be used."""


class OptionError(Error, ValueError):
    """An option or a token has no meaning."""


class ConstraintError(Error, ValueError):
    """A grammar or schema cannot be enforced."""


class BudgetError(Error, MemoryError):
    """The memory budget, or the memory of the GPU, does not suffice."""

    minimum: int | None = None
    """The smallest budget that works, in bytes, if that is known."""


class ContextFullError(Error, ValueError):
    """More tokens, or more sequences, than memory was set aside for."""


class QueueFullError(Error):
    """Too many requests are waiting."""


class ClosedError(Error):
    """The model is closed."""
