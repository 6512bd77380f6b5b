"""From text to token ids: the byte-level default, a user's tokenizer, encoding, splitting.

Covers `tokenizers` JSON files and local Hugging Face tokenizer folders. Does not cover training a
tokenizer, and never asks a hub. Invariant: the ids of a corpus are what the tokenizer itself gives
for its texts, without truncation, padding or template tokens, each document followed by
end-of-text where the tokenizer has one.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fusion_tasks.corpus import Corpus
from fusion_tasks.errors import CorpusError, TokenizerError

__all__ = ["END_OF_TEXT", "encode_corpus", "load_tokenizer", "split"]

_Id = TypeVar("_Id", bound=np.integer[Any])

END_OF_TEXT = "<|endoftext|>"

# A bare `tokenizers` file does not say which of its special tokens ends a text.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")

# What one call of the tokenizer gets: its encodings keep about 100 bytes a token until they are
# turned into ids, so a long document goes in pieces.
_BATCH_CHARS = 1 << 22


def load_tokenizer(source: str | None) -> PreTrainedTokenizerFast:
    """Load a tokenizer, by default one token a byte.

    Args:
        source: A `tokenizers` JSON file or a local Hugging Face tokenizer folder; None for the
            byte-level tokenizer, whose ids 0 to 255 are the bytes and 256 is end-of-text.

    Raises:
        TokenizerError: There is no such file or folder, or it holds no fast tokenizer.
    """
    if source is None:
        return _byte_level()
    path = Path(os.path.expanduser(source))
    if not path.exists():
        raise TokenizerError(
            f"there is no tokenizer {path}: give a tokenizers JSON file or a tokenizer folder"
        )
    try:
        return _from_folder(path) if path.is_dir() else _from_file(path)
    except TokenizerError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception
        raise TokenizerError(
            f"{path} does not hold a fast tokenizer ({_reason(error)}): "
            "give a tokenizers JSON file or a tokenizer folder"
        ) from error


def encode_corpus(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int
) -> npt.NDArray[np.uint16] | npt.NDArray[np.uint32]:
    """The ids of all documents in the order of the seed, each followed by end-of-text.

    A special token that is spelt out in the text counts as that token, as it does when the
    tokenizer is called. A document of more than four million characters goes to the tokenizer in
    pieces that end with a line.

    Args:
        corpus: The text.
        tokenizer: What `load_tokenizer` gave.
        seed: Decides the order of the documents.

    Returns:
        uint16 where the vocabulary allows it, else uint32.

    Raises:
        TokenizerError: The tokenizer has no token for something in the text.
    """
    documents = corpus.ordered(seed)
    if tokenizer.backend_tokenizer.to_str() == _byte_level().backend_tokenizer.to_str():
        parts = [_bytes_as_ids(document) for document in documents]
        return np.concatenate(parts)
    dtype: type[np.uint16 | np.uint32] = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    end = tokenizer.eos_token_id
    tail = np.array([] if end is None else [end], dtype=dtype)
    # On a copy: files carry truncation and padding of their own, made for inference.
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    ids: list[npt.NDArray[Any]] = []
    for batch in _batches(documents):
        texts = [text for text, _ in batch]
        try:
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # `tokenizers` raises bare Exception
            raise TokenizerError(
                f"the tokenizer cannot encode {corpus.name} ({_reason(error)}): "
                "give one that has a token for everything in the text"
            ) from error
        for encoding, (_, is_last) in zip(encodings, batch, strict=True):
            ids.append(np.array(encoding.ids, dtype=dtype))
            if is_last:
                ids.append(tail)
    return np.concatenate(ids)


def split(
    ids: npt.NDArray[_Id], validation_fraction: float, context: int, batch: int = 1
) -> tuple[npt.NDArray[_Id], npt.NDArray[_Id]]:
    """Cut the tokens into training and validation, which is the tail.

    >>> train, validation = split(np.arange(100), 0.2, context=8)
    >>> train.size, validation[0]
    (80, np.int64(80))

    Args:
        ids: All tokens.
        validation_fraction: Part of the tokens that is kept from training, between 0 and 1.
        context: Tokens of a sequence.
        batch: Sequences of a global batch: training text that cannot fill one is too little.

    Raises:
        CorpusError: There is too little text.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction is {validation_fraction:g}, not between 0 and 1")
    # A sequence of inputs has targets that are one token ahead.
    train_tokens, validation_tokens = batch * context + 1, context + 1
    kept = round(ids.size * validation_fraction)
    if ids.size - kept < train_tokens or kept < validation_tokens:
        # One more each, as a part is rounded to whole tokens.
        needed = max(
            math.ceil((train_tokens + 1) / (1 - validation_fraction)),
            math.ceil((validation_tokens + 1) / validation_fraction),
        )
        raise CorpusError(
            f"the text has {ids.size} tokens; {batch} sequences of {context} tokens with a "
            f"validation fraction of {validation_fraction:g} need {needed}: give more text, "
            "a shorter context or a smaller batch"
        )
    return ids[: ids.size - kept], ids[ids.size - kept :]


def _byte_level() -> PreTrainedTokenizerFast:
    """One token a byte, with the byte's value as its id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Bytes that are printable in Latin-1 stand for themselves; the others, in their order, are
    # shown by the characters from 256 on.
    shown_as_is = {ord(symbol) for symbol in alphabet if ord(symbol) < 256}
    others = iter(symbol for symbol in alphabet if ord(symbol) >= 256)
    symbols = [chr(byte) if byte in shown_as_is else next(others) for byte in range(256)]
    backend = Tokenizer(
        models.BPE(vocab={symbol: byte for byte, symbol in enumerate(symbols)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return _wrap(backend, END_OF_TEXT)


def _wrap(backend: Tokenizer, end: str | None) -> PreTrainedTokenizerFast:
    special = {} if end is None else dict.fromkeys(("bos_token", "eos_token", "pad_token"), end)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    )


def _from_file(path: Path) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_file(str(path))
    special = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    return _wrap(backend, next((end for end in _KNOWN_ENDS if end in special), None))


def _from_folder(path: Path) -> PreTrainedTokenizerFast:
    # The explicit False keeps code in the folder from running, and transformers from asking.
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TokenizerError(
            f"{path} holds a slow tokenizer ({type(tokenizer).__name__}): save it as a fast one, "
            "with a tokenizer.json"
        )
    return tokenizer


def _reason(error: Exception) -> str:
    first_line = str(error).strip().split("\n", maxsplit=1)[0]
    return first_line.rstrip(" :") or type(error).__name__


def _bytes_as_ids(document: str) -> npt.NDArray[np.uint16]:
    """The byte-level ids of a document, end-of-text included, without a loop over its bytes."""
    parts: list[npt.NDArray[np.uint16]] = []
    end = np.array([256], dtype=np.uint16)
    for text in document.split(END_OF_TEXT):
        parts.append(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16))
        parts.append(end)
    return np.concatenate(parts)


def _batches(documents: tuple[str, ...]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of documents, about `_BATCH_CHARS` together, each with "ends its document"."""
    batch: list[tuple[str, bool]] = []
    chars = 0
    for document in documents:
        for piece in _pieces(document):
            batch.append(piece)
            chars += len(piece[0])
            if chars >= _BATCH_CHARS:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


def _pieces(document: str) -> Iterator[tuple[str, bool]]:
    start = 0
    while len(document) - start > _BATCH_CHARS:
        line_end = document.rfind("\n", start, start + _BATCH_CHARS) + 1
        stop = line_end if line_end > start else start + _BATCH_CHARS
        yield document[start:stop], False
        start = stop
    yield document[start:], True
