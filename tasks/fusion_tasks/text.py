"""The Prefect task that turns text into a corpus of tokens in the store."""

import hashlib
from dataclasses import dataclass

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from fusion_storage.store import Store
from fusion_storage.tokens import write_tokens
from fusion_tasks.corpus import read_corpus, unigram_entropy
from fusion_tasks.tokenizer import encode_corpus, load_tokenizer, split

__all__ = ["PreparedText", "prepare_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedText:
    """A tokenised corpus in the store.

    Attributes:
        corpus: Its name in the store, which stands for its content.
        title: What it was made of, for people.
        tokens: Number of tokens.
        train_tokens: Tokens before the held-out tail.
        vocabulary: Size of the tokenizer's vocabulary.
        unigram_entropy: Entropy of the token frequencies, nats per token.
        bytes: Size of the text in UTF-8.
    """

    corpus: str
    title: str
    tokens: int
    train_tokens: int
    vocabulary: int
    unigram_entropy: float
    bytes: int


@task(cache_policy=NO_CACHE)
def prepare_text(
    store: Store,
    *,
    data: str | None,
    tokenizer: str | None,
    seed: int,
    validation_fraction: float,
    context: int,
    batch: int,
) -> PreparedText:
    """Read text, encode it, and keep the tokens in the store; the same text is stored once.

    Args:
        store: Where the tokens go.
        data: A file or folder of UTF-8 text; None for the Python standard library's sources.
        tokenizer: A `tokenizers` file or a tokenizer directory; None for bytes.
        seed: Seeds the order of the documents.
        validation_fraction: Share of the tokens, at the end, that is held out.
        context: Tokens in a window; there must be at least one window on either side.
        batch: Windows in a global batch.

    Raises:
        CorpusError: Nothing to read, or too little of it.
        TokenizerError: No usable tokenizer.
    """
    corpus = read_corpus(data)
    encoder = load_tokenizer(tokenizer)
    ids = encode_corpus(corpus, encoder, seed)
    train, _ = split(ids, validation_fraction, context, batch)
    content = hashlib.sha256(f"{ids.dtype.name}/{len(ids)}/".encode())
    content.update(np.ascontiguousarray(ids).tobytes())
    name = content.hexdigest()[:32]
    write_tokens(store, name, ids)
    return PreparedText(
        corpus=name,
        title=corpus.name,
        tokens=len(ids),
        train_tokens=len(train),
        vocabulary=len(encoder),
        unigram_entropy=unigram_entropy(ids, len(encoder)),
        bytes=corpus.bytes,
    )
