"""Runs Mixture-of-Experts language models that are bigger than memory.

>>> import moeflux
>>> model = moeflux.open("demo", memory="64MiB")
>>> print(model.chat().ask("What is 17 + 25?", temperature=0))
17 + 25 = 42
"""

from moeflux._errors import (
    BudgetError,
    CheckpointError,
    ClosedError,
    ConstraintError,
    ContextFullError,
    Error,
    FileError,
    MissingFileError,
    OptionError,
    QueueFullError,
)
from moeflux._native import (
    Answer,
    Chat,
    Model,
    Piece,
    RouterChoices,
    Session,
    Stream,
    TokenLogprobs,
    Tokenizer,
    ToolCall,
    Usage,
    __version__,
    gpus,
    open,
    plan,
)

__all__ = [
    "Answer",
    "BudgetError",
    "Chat",
    "CheckpointError",
    "ClosedError",
    "ConstraintError",
    "ContextFullError",
    "Error",
    "FileError",
    "MissingFileError",
    "Model",
    "OptionError",
    "Piece",
    "QueueFullError",
    "RouterChoices",
    "Session",
    "Stream",
    "TokenLogprobs",
    "Tokenizer",
    "ToolCall",
    "Usage",
    "__version__",
    "gpus",
    "open",
    "plan",

]
