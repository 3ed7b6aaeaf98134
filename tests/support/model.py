"""Models for tests: the real SmolLM2, random small Llamas in Hugging Face layout, and small GGUF files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.local.fetch import pull
from shared.model_files import ModelFolder

CACHE = Path(os.environ.get("HEADRACE_TEST_CACHE") or Path(__file__).parents[2] / ".cache" / "tests")

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# a few merges, so that tokens longer than a byte occur; Ġ is the byte-level space
_MERGES = "t h,i n,a n,e r,o n,Ġ t,Ġt h,Ġth e,h e,Ġ a,Ġ s,r e,n d,Ġa nd,in g,o r,e n,l l,o u,Ġ w,s t,Ġ o,Ġ b,Ġ c,Ġo f,i s,i t"


def smollm_folder() -> ModelFolder:
    """Return SmolLM2-135M-Instruct from the test cache, fetching it the first time."""
    return pull("smollm2-135m", CACHE, lambda what, share: None)


def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    """Return (tokens by id, merges as "left right") of the small byte-level BPE: 3 special tokens, 256 bytes, merged tokens."""
    merges = _MERGES.split(",")
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)], merges


def tiny_llama_folder(path: Path, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Make `path` a folder in Hugging Face layout with a random Llama (float32 safetensors) and a byte-level tokenizer; return it.

    3 layers, hidden 64, 4 heads, 2 KV heads, vocabulary 320, context 4096; `config_overrides` are fields of LlamaConfig.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            # wide enough for clear winners among the logits: greedy output then does not hang on rounding
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
            "dtype": torch.float32,
            **config_overrides,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(path)

    tokens, merges = byte_level_vocabulary()
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "model_max_length": config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return path


def tiny_gguf(path: Path, *, drop: tuple[str, ...] = (), tensors: dict[str, np.ndarray[Any, Any]] | None = None, **overrides: Any) -> Path:
    """Write a small Llama-like GGUF (metadata, embedding, extra `tensors`); `overrides` replace metadata, "." written as "__"."""
    tokens, merges = byte_level_vocabulary()
    metadata: dict[str, Any] = {
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 160,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    metadata.update({key.replace("__", "."): value for key, value in overrides.items()})
    architecture = metadata.pop("general.architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if key in drop:
            continue
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    vocabulary = len(metadata["tokenizer.ggml.tokens"])
    writer.add_tensor("token_embd.weight", np.zeros((vocabulary, metadata["llama.embedding_length"]), np.float32))
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
