"""The errors of the coarse tasks.

    FusionError                 (fusion_dask.errors) every error that a person can act on
    ├── CorpusError             a text that is missing, unreadable, not text, or too little
    ├── TokenizerError          a tokenizer that cannot be loaded
    ├── ModelError              a model configuration that is missing or does not fit
    └── PublishError            a place where the model cannot be published

Each message is one line that ends with what the person can do. All of them survive pickling: they
take their message and nothing else.
"""

from fusion_dask.errors import FusionError

__all__ = ["CorpusError", "ModelError", "PublishError", "TokenizerError"]


class CorpusError(FusionError):
    """The text cannot be used for training."""


class TokenizerError(FusionError):
    """The tokenizer cannot be used."""


class ModelError(FusionError):
    """The model cannot be built."""


class PublishError(FusionError):
    """The model cannot be published there."""
