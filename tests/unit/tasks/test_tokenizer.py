from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fusion_tasks import tokenizer as tokenizer_module
from fusion_tasks.corpus import Corpus
from fusion_tasks.errors import CorpusError, TokenizerError
from fusion_tasks.tokenizer import END_OF_TEXT, encode_corpus, load_tokenizer, split

BYTES = load_tokenizer(None)
TEXTS = (
    "def f(x):\n    return x + 1\n\n\n" * 20,
    "Größe, naïveté, 漢字, \U0001f600 and\ttabs\r\n",
    f"before{END_OF_TEXT}after",
    f"{END_OF_TEXT}",
    "x",
)


def corpus_of(*documents: str) -> Corpus:
    return Corpus(name="x", documents=documents, bytes=0, files=0, skipped=0, digest="")


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert isinstance(ids, list)
    return ids


def bpe_file(path: Path, end: str | None = "</s>", vocab: int = 400) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        show_progress=False,
        special_tokens=[] if end is None else [end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.save(str(path))
    return path


def test_the_default_has_one_token_a_byte_and_an_end() -> None:
    assert len(BYTES) == 257
    assert BYTES.eos_token == END_OF_TEXT
    assert BYTES.eos_token_id == 256
    assert ids_of(BYTES, "aé\0") == [97, 195, 169, 0]


@given(st.text())
def test_bytes_go_there_and_back(text: str) -> None:
    ids = ids_of(BYTES, text)
    assert BYTES.decode(ids) == text
    if END_OF_TEXT not in text:
        assert ids == list(text.encode())


@given(st.lists(st.one_of(st.text(min_size=1), st.sampled_from(TEXTS)), min_size=1, max_size=5))
def test_the_fast_encoding_equals_the_tokenizer(documents: list[str]) -> None:
    corpus = corpus_of(*documents)
    ids = encode_corpus(corpus, BYTES, seed=3)
    expected = [token for text in corpus.ordered(3) for token in [*ids_of(BYTES, text), 256]]
    assert ids.dtype == np.uint16
    assert ids.tolist() == expected


def test_a_tokenizers_file_encodes_as_itself_with_its_own_end(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file(tmp_path / "tokenizer.json")))
    assert tokenizer.eos_token == "</s>"
    corpus = corpus_of(*TEXTS)
    end = tokenizer.eos_token_id
    expected = [token for text in corpus.ordered(1) for token in [*ids_of(tokenizer, text), end]]
    ids = encode_corpus(corpus, tokenizer, seed=1)
    assert ids.tolist() == expected
    assert len(expected) < len("".join(TEXTS).encode())


def test_without_a_known_end_documents_follow_each_other(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file(tmp_path / "tokenizer.json", end=None)))
    assert tokenizer.eos_token is None
    ids = encode_corpus(corpus_of("one", "two"), tokenizer, seed=0)
    texts = corpus_of("one", "two").ordered(0)
    assert ids.tolist() == [*ids_of(tokenizer, texts[0]), *ids_of(tokenizer, texts[1])]


def test_truncation_and_padding_of_a_file_do_not_touch_the_text(tmp_path: Path) -> None:
    path = bpe_file(tmp_path / "tokenizer.json")
    plain = encode_corpus(corpus_of(*TEXTS), load_tokenizer(str(path)), seed=0)
    backend = Tokenizer.from_file(str(path))
    backend.enable_truncation(2)
    backend.enable_padding()
    backend.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert encode_corpus(corpus_of(*TEXTS), tokenizer, seed=0).tolist() == plain.tolist()
    assert tokenizer.backend_tokenizer.truncation is not None


def test_a_large_vocabulary_gets_wider_ids(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(1 << 16)}
    for extra, dtype in ((0, np.uint16), (1, np.uint32)):
        vocab = words | {f"x{number}": (1 << 16) + number for number in range(extra)}
        backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token="w0"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.save(str(tmp_path / "words.json"))
        ids = encode_corpus(
            corpus_of("w65535 w1"), load_tokenizer(str(tmp_path / "words.json")), seed=0
        )
        assert ids.dtype == dtype
        assert ids.tolist() == [65535, 1]


def test_a_text_that_the_tokenizer_has_no_token_for_is_one_line(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel(vocab={"known": 0}, unk_token="[UNK]"))
    backend.save(str(tmp_path / "words.json"))
    tokenizer = load_tokenizer(str(tmp_path / "words.json"))
    assert encode_corpus(corpus_of("known"), tokenizer, seed=0).tolist() == [0]
    with pytest.raises(TokenizerError, match=r"cannot encode x \(.+\): give one") as caught:
        encode_corpus(corpus_of("known", "unknown"), tokenizer, seed=0)
    assert "\n" not in str(caught.value)


def test_long_documents_go_in_pieces_that_end_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(bpe_file(tmp_path / "tokenizer.json")))
    lines = "".join(f"line {number}\n" for number in range(50))
    corpus = corpus_of(lines, "short", lines.replace("\n", ""))
    whole = encode_corpus(corpus, tokenizer, seed=0)
    monkeypatch.setattr(tokenizer_module, "_BATCH_CHARS", 64)
    pieces = encode_corpus(corpus, tokenizer, seed=0)
    assert tokenizer.decode(pieces.tolist()) == tokenizer.decode(whole.tolist())
    assert pieces.tolist().count(tokenizer.eos_token_id) == 3
    only_lines = encode_corpus(corpus_of(lines), tokenizer, seed=0)
    assert only_lines.tolist() == [*ids_of(tokenizer, lines), tokenizer.eos_token_id]


@pytest.mark.parametrize("source", [None, "file"])
def test_a_saved_folder_loads_as_the_same_tokenizer(tmp_path: Path, source: str | None) -> None:
    path = source and str(bpe_file(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(path)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.eos_token == tokenizer.eos_token
    corpus = corpus_of(*TEXTS)
    expected = encode_corpus(corpus, tokenizer, seed=0).tolist()
    assert encode_corpus(corpus, again, seed=0).tolist() == expected


@pytest.mark.parametrize("content", ["", "{}", "[1]", "some text\nof two lines", '{"model": 1}'])
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(TokenizerError, match="does not hold a fast tokenizer") as caught:
        load_tokenizer(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_and_a_missing_path_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="does not hold a fast tokenizer") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
    with pytest.raises(TokenizerError, match="there is no tokenizer"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_code_in_a_tokenizer_folder_does_not_run(tmp_path: Path) -> None:
    BYTES.save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [null, "evil.Evil"]}}'
    )
    with pytest.raises(TokenizerError):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@given(
    st.integers(min_value=0, max_value=400),
    st.floats(min_value=0.01, max_value=0.99),
    st.integers(min_value=1, max_value=16),
    st.integers(min_value=1, max_value=4),
)
def test_a_split_has_room_for_a_batch_or_says_what_it_needs(
    size: int, fraction: float, context: int, batch: int
) -> None:
    ids = np.arange(size)
    try:
        train, validation = split(ids, fraction, context, batch)
    except CorpusError as error:
        needed = int(str(error).split(" need ")[1].split(":")[0])
        assert needed > size
        split(np.arange(needed), fraction, context, batch)
    else:
        assert np.concatenate([train, validation]).tolist() == ids.tolist()
        assert train.size >= batch * context + 1
        assert validation.size >= context + 1
        assert abs(validation.size - size * fraction) <= 1


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_fraction_outside_of_its_range_is_a_mistake_of_the_caller(fraction: float) -> None:
    with pytest.raises(ValueError, match="not between 0 and 1"):
        split(np.arange(100), fraction, 4)
