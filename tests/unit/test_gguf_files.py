"""GGUF metadata becomes the same config, tokenizer and template that transformers reads out of it."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from shared import gguf_files
from shared.gguf_header import GGUFError, read_header
from shared.model_files import ModelFolder
from tests.support.model import byte_level_vocabulary, tiny_gguf

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces,\ttabs\n\n\nand newlines \r\n at the end  ",
    "I'm sure they'll say it's fine; we've SEEN IT'S WORSE",
    "def f(x):\n    return x ** 2  # comment\n\n\n    \n",
    "Zażółć gęślą jaźń. Ångström, naïve café, e\u0301 (combining)",
    "中文字符和標點。日本語テキスト、한국어",
    "नमस्ते दुनिया مرحبا بالعالم שלום",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 \U0001f1f5\U0001f1f1",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|> <|endoftext|><repo_name>x<|notatoken|>",
    "\u0000\u0001\x7f\ufeff\u200b\u00a0",
    "https://example.org/a_b-c?d=e&f=%20#g",
    "a" * 3000,
]
DIGITS = ["12345", "in 2024, 3.14159 or 1,000,000", "x1y22z333", "٣٤٥ ½ ² Ⅻ", "version 1.2.3-rc4"]


def derived(path: Path) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in gguf_files.derive(read_header(path), "tiny").items()}


def config(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = derived(path)["config.json"]
    return result


def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_str(gguf_files.derive(read_header(path), "tiny")["tokenizer.json"])


# ---- the real file, against transformers


@pytest.fixture(scope="module")
def alone(smollm: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the GGUF file and nothing else, so that transformers cannot read what we derived."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "model.gguf").symlink_to(smollm.path / "model.gguf")
    return folder


@pytest.fixture(scope="module")
def their_tokenizer(alone: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf")


def test_header_agrees_with_the_gguf_package(smollm: ModelFolder) -> None:
    path = smollm.path / "model.gguf"
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    for key, value in ours.metadata.items():
        assert value == theirs.fields[key].contents(), key
    assert len(ours.tensors) == len(theirs.tensors) == 272
    for tensor in theirs.tensors:
        place = ours.tensors[tensor.name]
        assert (place.kind, place.offset, place.size_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert place.shape == tuple(reversed(tensor.shape.tolist()))


def test_derives_a_real_file_in_a_few_seconds(smollm: ModelFolder) -> None:
    start = time.perf_counter()
    gguf_files.derive(read_header(smollm.path / "model.gguf"), "x")
    assert time.perf_counter() - start < 4  # 0.2 s on an idle core


def test_config_equals_what_transformers_reads(smollm: ModelFolder, alone: Path) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(alone, gguf_file="model.gguf")
    written = json.loads((smollm.path / "config.json").read_text())
    loaded = AutoConfig.from_pretrained(smollm.path)
    assert type(loaded) is type(theirs)
    names = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["vocab_size", "max_position_embeddings", "tie_word_embeddings", "rope_parameters", "attention_bias", "mlp_bias", "hidden_act"]
    for name in [*names, "bos_token_id", "eos_token_id", "pad_token_id"]:
        assert getattr(loaded, name) == getattr(theirs, name), name
    assert np.float32(loaded.rms_norm_eps) == np.float32(theirs.rms_norm_eps)
    assert written["rms_norm_eps"] == 1e-5
    assert written["rope_theta"] == 100000.0
    assert written["rope_scaling"] is None
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["torch_dtype"] == "bfloat16"
    assert "rope_freqs_in_weights" not in written


def test_tokenizer_encodes_as_transformers_does(smollm: ModelFolder, their_tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    theirs = their_tokenizer
    ours = Tokenizer.from_file(str(smollm.path / "tokenizer.json"))
    from_folder = AutoTokenizer.from_pretrained(smollm.path)
    for text in CORPUS:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text), text
        assert ids == from_folder.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.get_vocab_size() == 49152


def test_digits_are_single_tokens_as_in_the_original_tokenizer(smollm: ModelFolder, their_tokenizer: Any) -> None:
    """SmolLM2's own tokenizer.json splits digits first (and llama.cpp's "smollm" does); transformers' GGUF conversion leaves that out."""
    ours = Tokenizer.from_file(str(smollm.path / "tokenizer.json"))
    assert ours.encode("12345").tokens == ["1", "2", "3", "4", "5"]
    assert ours.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]
    theirs = Tokenizer.from_str(their_tokenizer.backend_tokenizer.to_str())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    for text in DIGITS:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids) == text


def test_special_tokens_are_all_control_tokens(smollm: ModelFolder) -> None:
    metadata = read_header(smollm.path / "model.gguf").metadata
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(kinds, list)
    added = Tokenizer.from_file(str(smollm.path / "tokenizer.json")).get_added_tokens_decoder()
    assert sorted(added) == [index for index, kind in enumerate(kinds) if kind == 3]
    assert all(token.special and not token.normalized for token in added.values())
    assert added[2].content == "<|im_end|>"


def test_chat_template_and_end_tokens(smollm: ModelFolder, their_tokenizer: Any) -> None:
    theirs = their_tokenizer
    written = json.loads((smollm.path / "tokenizer_config.json").read_text())
    assert written["chat_template"] == theirs.chat_template
    assert (written["bos_token"], written["eos_token"]) == (theirs.bos_token, theirs.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert written["model_max_length"] == 8192
    assert json.loads((smollm.path / "generation_config.json").read_text())["eos_token_id"] == 2


# ---- configs that the real file does not have


def test_output_weights_untie_the_embeddings(tmp_path: Path) -> None:
    assert config(tiny_gguf(tmp_path / "a.gguf"))["tie_word_embeddings"] is True
    weights = {"output.weight": np.zeros((286, 64), np.float32)}
    assert config(tiny_gguf(tmp_path / "b.gguf", tensors=weights))["tie_word_embeddings"] is False


def test_rope_factors_in_the_weights_are_noted(tmp_path: Path) -> None:
    found = config(tiny_gguf(tmp_path / "a.gguf", tensors={"rope_freqs.weight": np.ones(8, np.float32)}))
    assert found["rope_freqs_in_weights"] is True


def test_rope_scaling_linear(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "a.gguf", llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert config(path)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config(tiny_gguf(tmp_path / "b.gguf", llama__rope__scale_linear=2.0))["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_rope_scaling_yarn(tmp_path: Path) -> None:
    path = tiny_gguf(
        tmp_path / "a.gguf",
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=8.0,
        llama__rope__scaling__original_context_length=128,
    )
    expected = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0}
    assert config(path)["rope_scaling"] == expected


def test_several_end_tokens(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "a.gguf", tokenizer__ggml__eos_token_id=0, tokenizer__ggml__eot_token_id=5)
    # the end token, the named end of turn, and <|im_end|>, known by its text
    assert derived(path)["generation_config.json"]["eos_token_id"] == [0, 5, 2]


def test_recommended_sampling(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "a.gguf", general__sampling__temp=0.6, general__sampling__top_p=0.95, general__sampling__top_k=20)
    found = json.loads(gguf_files.derive(read_header(path), "tiny", {"temperature": 0.1})["generation_config.json"])
    assert (found["temperature"], found["top_p"], found["top_k"]) == (0.6, 0.95, 20)  # the file knows better


# ---- tokenizers that the real file does not have


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", " 12345", " years", "\n ", " IT", "'", "S", "!!", "\n\n"]),
        ("default", ["it", "'s", " 12345", " years", "\n ", " IT", "'", "S", "!!", "\n\n"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", "5", " years", "\n ", " IT", "'", "S", "!!", "\n\n"]),
        ("llama-bpe", ["it", "'s", " ", "123", "45", " years", "\n", " ", " IT", "'S", "!!\n\n"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "5", " years", "\n", " ", " IT", "'S", "!!\n\n"]),
    ],
)
def test_pre_tokenizers_split_as_published(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    built = tokenizer(tiny_gguf(tmp_path / "a.gguf", tokenizer__ggml__pre=pre))
    text = "it's 12345 years\n  IT'S!!\n\n"
    assert built.pre_tokenizer is not None
    assert [text[start:end] for _, (start, end) in built.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_bos_is_added_when_the_file_says_so(tmp_path: Path) -> None:
    assert tokenizer(tiny_gguf(tmp_path / "a.gguf")).encode("hi").ids[0] != 1
    told = tokenizer(tiny_gguf(tmp_path / "b.gguf", tokenizer__ggml__add_bos_token=True))
    plain = told.encode("hi", add_special_tokens=False).ids
    assert told.encode("hi").ids == [1, *plain]
    # Llama 3 files may leave it out and mean yes
    assert tokenizer(tiny_gguf(tmp_path / "c.gguf", tokenizer__ggml__pre="llama-bpe")).encode("hi").ids[0] == 1


def test_user_defined_tokens_are_added_but_not_special(tmp_path: Path) -> None:
    tokens, _ = byte_level_vocabulary()
    tokens.append("<tool>")
    kinds = [3, 3, 3, *[1] * (len(tokens) - 4), 4]
    built = tokenizer(tiny_gguf(tmp_path / "a.gguf", tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=kinds))
    assert built.encode("a<tool>b").ids[1] == len(tokens) - 1
    assert built.get_added_tokens_decoder()[len(tokens) - 1].special is False
    assert built.decode(built.encode("a<tool>b").ids) == "a<tool>b"


def sentence_piece(text: str, pieces: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's BPE as its paper gives it: join the neighbours that make the best-scored piece until none do; bytes for the rest."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(scores[pieces[a + b]], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in pieces]
        if not joins:
            break
        at = -max(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = [[pieces[s]] if s in pieces else [pieces[f"<0x{byte:02X}>"] for byte in s.encode()] for s in symbols]
    return [token for group in ids for token in group]


def sentence_piece_gguf(path: Path, **more: Any) -> tuple[Path, list[str], list[float]]:
    words = [*"▁thesingoradlwu", "▁t", "he", "▁the", "in", "ing", "▁s", "or", "on", "▁a", "an", "and", "▁and", "ld", "ll", "el", "wo"]
    words += ["rld", "world", "▁world", "▁w", "or▁", "lo", "hel", "hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merged = [word for word in words if len(word) > 1]
    scores = [0.0] * 259 + [-float(merged.index(word)) if word in merged else -1000.0 - at for at, word in enumerate(words)]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    path = tiny_gguf(
        path,
        drop=("tokenizer.ggml.merges", "tokenizer.ggml.pre"),
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__scores=scores,
        tokenizer__ggml__token_type=kinds,
        tokenizer__ggml__unknown_token_id=0,
        **more,
    )
    return path, tokens, scores


def test_sentence_piece_vocabulary(tmp_path: Path) -> None:
    path, tokens, scores = sentence_piece_gguf(tmp_path / "a.gguf")
    built = tokenizer(path)
    pieces = {token: index for index, token in enumerate(tokens)}
    for text in ["hello world", "the end and the thing", "  spaces  kept ", "héllo 🙂 wörld", "or on or", "singing and selling world wool"]:
        ids = built.encode(text, add_special_tokens=False).ids
        assert ids == sentence_piece(text, pieces, scores), text
        assert built.decode(ids) == text
    assert built.encode("hello").ids[0] == 1  # Llama files may leave add_bos_token out and mean yes
    assert built.encode("the</s>", add_special_tokens=False).tokens == ["▁the", "</s>"]


def test_sentence_piece_without_space_prefix(tmp_path: Path) -> None:
    path, *_ = sentence_piece_gguf(tmp_path / "a.gguf", tokenizer__ggml__add_space_prefix=False)
    built = tokenizer(path)
    assert built.encode("the", add_special_tokens=False).tokens == ["t", "he"]
    assert built.decode(built.encode(" the", add_special_tokens=False).ids) == " the"


# ---- refusals


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general__architecture": "gemma3"}, "architecture 'gemma3' is not supported yet"),
        ({"tokenizer__ggml__pre": "tekken"}, "pre-tokenizer 'tekken' is not supported yet"),
        ({"tokenizer__ggml__model": "t5"}, "tokenizer model 't5' is not supported yet"),
        ({"tokenizer__ggml__merges": ["zz qq"]}, "tokenizer merges do not fit the vocabulary"),
        ({"tokenizer__ggml__merges": ["th"]}, "not a pair"),
        ({"tokenizer__ggml__tokens": [1, 2, 3]}, "tokenizer.ggml.tokens is not a list of texts"),
        ({"llama__expert_count": 8}, "mixtures of experts"),
        ({"split__count": 3}, "split over several files"),
        ({"llama__rope__scaling__type": "longrope"}, "rotary scaling 'longrope'"),
        ({"llama__rope__dimension_count": 8}, "only a part of each head"),
        ({"llama__block_count": "two"}, "llama.block_count is a str"),
        ({"llama__attention__head_count": [4, 4]}, "llama.attention.head_count is a list"),
        ({"drop": ("llama.context_length",)}, "metadata lacks llama.context_length"),
        ({"drop": ("tokenizer.ggml.tokens",)}, "metadata lacks tokenizer.ggml.tokens"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(GGUFError, match=reason) as caught:
        derived(tiny_gguf(tmp_path / "a.gguf", **change))
    assert "\n" not in str(caught.value)


def test_every_truncation_of_a_file_is_an_error(tmp_path: Path) -> None:
    whole = tiny_gguf(tmp_path / "a.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 8, 23, 24, 30, *range(100, len(whole), 997), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(GGUFError):
            read_header(cut)


def test_random_corruption_never_crashes(tmp_path: Path) -> None:
    whole = bytearray(tiny_gguf(tmp_path / "a.gguf").read_bytes())
    random = np.random.default_rng(0)
    broken = tmp_path / "broken.gguf"
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for at in random.integers(0, 9000, 3):
            data[at] = random.integers(0, 256)
        broken.write_bytes(data)
        try:
            gguf_files.derive(read_header(broken), "x")
        except GGUFError:
            refused += 1
    assert refused > 10
