"""Turns GGUF metadata into the small files of a Hugging Face folder (config, tokenizer, template). Reads no weights, writes no files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shared.gguf_header import GGUFError, GGUFHeader, Value

Json = dict[str, Any]

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_F32, _F16 = 0, 1  # general.file_type of unquantised files; everything else is expanded to bfloat16

# Tokens that end a chat turn, for files which name only one end token.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")

# The published split patterns of each family (its tokenizer.json on the Hub), by `tokenizer.ggml.pre`.
_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = frozenset({"default", "gpt-2", "gpt2"})
_DIGITS = frozenset({"smollm", "starcoder", "refact", "codeshell"})
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN2 = frozenset({"qwen2"})


def derive(header: GGUFHeader, name: str, sampling: Mapping[str, float] | None = None) -> dict[str, str]:
    """Return the text of each file of a Hugging Face folder, by file name; `sampling` holds defaults that the metadata may override.

    Raises:
        GGUFError: for what is not supported or inconsistent.
    """
    facts = _Facts(header.metadata)
    tokenizer = _tokenizer(facts)
    return {
        "config.json": _dump(_config(facts, header, name)),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": _dump(_tokenizer_config(facts)),
        "generation_config.json": _dump({**(sampling or {}), **_generation_config(facts)}),
    }


class _Facts:
    """Typed access to metadata: a missing or wrongly typed entry is a GGUFError that names the key."""

    def __init__(self, metadata: dict[str, Value]) -> None:
        self._metadata = metadata

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self._get(key, str, default)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self._get(key, int, default)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 as the shortest decimal that names it: 1e-05, not 9.999999747378752e-06."""
        value = self._get(key, (int, float), default)
        return float(str(np.float32(value)))

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._get(key, bool, default)
        return value

    def optional_id(self, key: str) -> int | None:
        """A token id, or None; some converters write -1 or 2^32-1 for none."""
        value = self.integer(key, -1)
        return value if 0 <= value < len(self.tokens()) else None

    def tokens(self) -> list[str]:
        tokens: list[str] = self._get("tokenizer.ggml.tokens", list, None)
        if not tokens or not isinstance(tokens[0], str):
            raise GGUFError("tokenizer.ggml.tokens is not a list of texts")
        return tokens

    def array(self, key: str) -> list[Any]:
        value: list[Any] = self._get(key, list, [])
        return value

    def _get(self, key: str, kind: Any, default: Any) -> Any:
        value = self._metadata.get(key, default)
        if value is None:
            raise GGUFError(f"metadata lacks {key}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise GGUFError(f"metadata entry {key} is a {type(value).__name__}, which is not supported")
        return value


# ---- config.json


def _config(facts: _Facts, header: GGUFHeader, name: str) -> Json:
    architecture = facts.text("general.architecture")
    if architecture != "llama":
        raise GGUFError(f"architecture {architecture[:40]!r} is not supported yet (only llama)")
    if facts.integer("llama.expert_count", 0):
        raise GGUFError("mixtures of experts are not supported yet")
    if facts.integer("split.count", 1) > 1:
        raise GGUFError("split over several files, which is not supported; merge it with llama-gguf-split")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GGUFError("has no token_embd.weight tensor")

    hidden, heads = facts.integer("llama.embedding_length"), facts.integer("llama.attention.head_count")
    if hidden <= 0 or heads <= 0 or embedding.shape[1] != hidden:
        raise GGUFError("llama.embedding_length and llama.attention.head_count do not fit the weights")
    head_dim = facts.integer("llama.attention.key_length", hidden // heads)
    if facts.integer("llama.rope.dimension_count", head_dim) != head_dim:
        raise GGUFError("rotary embedding of only a part of each head is not supported")
    config: Json = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "_name_or_path": name,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": facts.integer("llama.feed_forward_length"),
        "num_hidden_layers": facts.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": facts.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("llama.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(facts),
        "max_position_embeddings": facts.integer("llama.context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "torch_dtype": {_F32: "float32", _F16: "float16"}.get(facts.integer("general.file_type", -1), "bfloat16"),
        "bos_token_id": facts.optional_id("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts.optional_id("tokenizer.ggml.eos_token_id"),
        "pad_token_id": facts.optional_id("tokenizer.ggml.padding_token_id"),
    }
    if "rope_freqs.weight" in header.tensors:
        # Llama 3's frequency factors come as a tensor; the parameters they were made from are not in the file.
        config["rope_freqs_in_weights"] = True
    return config


def _rope_scaling(facts: _Facts) -> Json | None:
    key = "llama.rope.scaling."
    old_linear = facts.number("llama.rope.scale_linear", 0.0)
    kind = facts.text(key + "type", "linear" if old_linear else "none")
    factor = facts.number(key + "factor", old_linear or 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise GGUFError(f"rotary scaling {kind[:40]!r} is not supported")
    scaling: Json = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": facts.integer(key + "original_context_length"),
        "beta_fast": facts.number(key + "yarn_beta_fast", 32.0),
        "beta_slow": facts.number(key + "yarn_beta_slow", 1.0),
    }
    attention = facts.number(key + "attn_factor", 1.0)
    if attention != 1.0:
        # GGUF's factor multiplies YaRN's own; Hugging Face's replaces it
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


# ---- tokenizer.json


def _tokenizer(facts: _Facts) -> Tokenizer:
    kind = facts.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(facts)
        adds_bos = facts.text("tokenizer.ggml.pre", "default") in _LLAMA3
    elif kind == "llama":
        tokenizer = _sentence_piece(facts)
        adds_bos = True
    else:
        raise GGUFError(f"tokenizer model {kind[:40]!r} is not supported yet")

    tokens, kinds = facts.tokens(), facts.array("tokenizer.ggml.token_type")
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)
    bos = facts.optional_id("tokenizer.ggml.bos_token_id")
    if bos is not None and facts.flag("tokenizer.ggml.add_bos_token", adds_bos):
        first = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", f"{first}:1", "$B:1"], special_tokens=[(first, bos)]
        )
    return tokenizer


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    return vocabulary


def _byte_level(facts: _Facts) -> Tokenizer:
    pre = facts.text("tokenizer.ggml.pre", "default")
    merges = []
    for line in facts.array("tokenizer.ggml.merges"):
        left, space, right = str(line).partition(" ")
        if not space:
            raise GGUFError("tokenizer.ggml.merges holds a line that is not a pair")
        merges.append((left, right))
    try:
        # Llama 3 takes a word that is in the vocabulary whole, whatever its merges say
        model = models.BPE(vocab=_vocabulary(facts.tokens()), merges=merges, ignore_merges=pre in _LLAMA3)
    except Exception as error:  # tokenizers raises plain Exception
        raise GGUFError(f"tokenizer merges do not fit the vocabulary ({error})") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if pre in _LLAMA3 or pre in _QWEN2:
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT if pre in _LLAMA3 else _QWEN2_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise GGUFError(f"pre-tokenizer {pre[:40]!r} is not supported yet")


def _sentence_piece(facts: _Facts) -> Tokenizer:
    """Llama's SentencePiece BPE: merges are not in the file; each piece's score is the rank of the merge that makes it."""
    tokens, scores = facts.tokens(), facts.array("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise GGUFError("tokenizer.ggml.scores does not fit the vocabulary")
    vocabulary = _vocabulary(tokens)
    unknown = facts.optional_id("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_from_scores(vocabulary, scores),
        unk_token=tokens[0 if unknown is None else unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = facts.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece out of two others, best score first: what SentencePiece would choose among at any moment."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], left, right, piece[:cut], piece[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


# ---- tokenizer_config.json, generation_config.json


def _tokenizer_config(facts: _Facts) -> Json:
    tokens = facts.tokens()
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts.integer("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = facts.optional_id(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[name] = tokens[token]
    template = facts.text("tokenizer.chat_template", "")
    if template:
        config["chat_template"] = template
    return config


def _generation_config(facts: _Facts) -> Json:
    """How to generate: the tokens that end an answer, and the sampling that the model's makers recommend.

    The end token comes first, then ends of turn and message named in metadata or known by their text.
    """
    named = [facts.optional_id(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens, kinds = facts.tokens(), facts.array("tokenizer.ggml.token_type")
    known = [index for index, kind in enumerate(kinds[: len(tokens)]) if kind == _CONTROL and tokens[index] in _TURN_ENDS]
    ends = list(dict.fromkeys(end for end in [*named, *known] if end is not None))
    config: Json = {"_from_model_config": True, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        token = facts.optional_id(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[name] = token
    if (temperature := facts.number("general.sampling.temp", -1)) >= 0:
        config["temperature"] = temperature
    if (top_p := facts.number("general.sampling.top_p", -1)) >= 0:
        config["top_p"] = top_p
    if (top_k := facts.integer("general.sampling.top_k", -1)) >= 0:
        config["top_k"] = top_k
    return config


def _dump(value: Json) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
