"""locate() finds every kind of model, derives what is missing once, and says in one line what is wrong with a broken one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shared import model_files
from shared.model_files import ModelError, ModelFolder, locate
from tests.support.model import byte_level_vocabulary, smollm_folder, tiny_gguf, tiny_llama_folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("models") / "Tiny Llama")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def refusal(model: str | Path, state_dir: Path) -> str:
    with pytest.raises(ModelError) as caught:
        locate(str(model), state_dir)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def visible(folder: Path) -> list[str]:
    """Names in `folder`; locks are left out, temporary folders are not."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock")) if folder.exists() else []


# ---- what can be located


def test_folder(tiny: Path, tmp_path: Path) -> None:
    found = locate(str(tiny), tmp_path)
    assert found == ModelFolder(tiny.resolve(), "Tiny Llama", "tiny-llama")
    assert visible(tmp_path / "models") == []  # nothing to derive


def test_served_name(tiny: Path, tmp_path: Path) -> None:
    found = locate(str(tiny), tmp_path, "Acme/Chat 1.5")
    assert (found.name, found.pool) == ("Acme/Chat 1.5", "acme-chat-1-5")


def test_gguf_file(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "Some-Model.Q4_1.gguf")
    found = locate(str(file), tmp_path / "state")
    assert (found.name, found.pool) == ("Some-Model.Q4_1", "some-model-q4-1")
    assert found.path.parent == tmp_path / "state" / "models"
    assert (found.path / "model.gguf").resolve() == file
    model_files.check_folder(found.path)
    assert json.loads((found.path / "config.json").read_text())["num_hidden_layers"] == 2
    assert Tokenizer.from_file(str(found.path / "tokenizer.json")).encode("<|im_end|>").ids == [2]


def test_gguf_is_derived_once_and_again_when_it_changes(tmp_path: Path) -> None:
    file, state = tiny_gguf(tmp_path / "a.gguf"), tmp_path / "state"
    first = locate(str(file), state)
    stamp = (first.path / "config.json").stat().st_mtime_ns
    assert locate(str(file), state) == first
    assert (first.path / "config.json").stat().st_mtime_ns == stamp
    tiny_gguf(file, llama__block_count=5)
    second = locate(str(file), state)
    assert json.loads((second.path / "config.json").read_text())["num_hidden_layers"] == 5
    assert second.pool == first.pool
    assert json.loads((first.path / "config.json").read_text())["num_hidden_layers"] == 2  # someone may still be reading it


def test_two_files_of_one_name_do_not_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = locate(str(tiny_gguf(tmp_path / "one" / "m.gguf")), tmp_path / "state")
    two = locate(str(tiny_gguf(tmp_path / "two" / "m.gguf", llama__block_count=7)), tmp_path / "state")
    assert one.path != two.path
    assert json.loads((two.path / "config.json").read_text())["num_hidden_layers"] == 7


def test_folder_with_one_gguf(tmp_path: Path) -> None:
    folder = tmp_path / "My Model"
    folder.mkdir()
    file = tiny_gguf(folder / "weights.gguf")
    found = locate(str(folder), tmp_path / "state")
    assert (found.name, found.pool) == ("My Model", "my-model")
    assert (found.path / "model.gguf").resolve() == file
    tiny_gguf(folder / "weights2.gguf")
    assert "2 GGUF files" in refusal(folder, tmp_path / "state")


def test_pulled_model_is_found_by_name(smollm: ModelFolder) -> None:
    state = smollm.path.parent.parent
    assert locate("smollm2-135m", state) == smollm == smollm_folder()
    assert (smollm.name, smollm.pool) == ("smollm2-135m", "smollm2-135m")
    assert smollm in model_files.pulled(state)


def test_pulled_hub_model_is_found_by_its_name_only(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "org-some-model"
    folder.parent.mkdir()
    copy.rename(folder)
    model_files.write_record(folder, "org/some-model", "hf:org/some-model", "pulled")
    assert locate("hf:org/some-model", tmp_path) == ModelFolder(folder, "org/some-model", "org-some-model")
    assert [found.name for found in model_files.pulled(tmp_path)] == ["org/some-model"]
    # the same folder name, another model
    assert "headrace models pull hf:org-some/model" in refusal("hf:org-some/model", tmp_path)


def test_derived_folders_are_not_pulled_models(tmp_path: Path) -> None:
    locate(str(tiny_gguf(tmp_path / "a.gguf")), tmp_path)
    assert model_files.pulled(tmp_path) == []


def test_tokenizer_is_converted_when_there_is_only_an_old_one(copy: Path, tmp_path: Path) -> None:
    tokens, merges = byte_level_vocabulary()
    wanted = Tokenizer.from_file(str(copy / "tokenizer.json")).encode("the other and\n 12").ids
    (copy / "tokenizer.json").unlink()
    (copy / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (copy / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    about = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    (copy / "tokenizer_config.json").write_text(json.dumps(about))
    found = locate(str(copy), tmp_path / "state")
    assert found.path != copy
    assert found.name == "copy"
    assert Tokenizer.from_file(str(found.path / "tokenizer.json")).encode("the other and\n 12").ids == wanted
    model_files.check_folder(found.path)
    assert not (copy / "tokenizer.json").exists()


def test_concurrent_callers_get_one_folder(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "a.gguf")
    code = "import sys; from pathlib import Path; from shared.model_files import locate; print(locate(sys.argv[1], Path(sys.argv[2])).path)"
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "state")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {process.communicate(timeout=60)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0] * 4
    assert len(answers) == 1
    assert visible(tmp_path / "state" / "models") == [Path(answers.pop()).name]


def test_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "a.gguf")
    code = (
        "import sys; from pathlib import Path; from shared.model_files import locate\n"
        f"locate({str(file)!r}, Path({str(tmp_path / 'state')!r}))\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


# ---- what is not there


def test_unknown_name_says_how_to_get_it(tmp_path: Path) -> None:
    assert "headrace models pull smollm2-135m" in refusal("smollm2-135m", tmp_path)
    assert "headrace models pull hf:org/name" in refusal("hf:org/name", tmp_path)


def test_paths_that_do_not_exist(tmp_path: Path) -> None:
    assert refusal("./nowhere/model", tmp_path) == "no model file or folder './nowhere/model'"
    assert refusal("model.gguf", tmp_path) == "no model file or folder 'model.gguf'"
    assert "written hf:org/name" in refusal("org/name", tmp_path)


@pytest.mark.parametrize("name", ["", "...", "über\n\n", "日本", "a" * 5000, "x\0y", "~nobody-of-this-name/x"])
def test_strange_names_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    assert len(refusal(name, tmp_path)) < 6000


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert "neither a GGUF file nor a folder" in refusal(tmp_path / "a.txt", tmp_path)
    (tmp_path / "folder").mkdir()
    assert "neither config.json nor a GGUF file" in refusal(tmp_path / "folder", tmp_path)


# ---- what is broken


def test_truncated_gguf_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "a.gguf")
    file.write_bytes(file.read_bytes()[:-100])
    said = refusal(file, tmp_path / "state")
    assert said.startswith(f"{file}: truncated")
    assert visible(tmp_path / "state" / "models") == []


def test_unsupported_gguf_is_named(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "a.gguf", general__architecture="gemma3")
    assert refusal(file, tmp_path) == f"{file}: architecture 'gemma3' is not supported yet (only llama)"


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(copy: Path, name: str, tmp_path: Path) -> None:
    (copy / name).unlink()
    assert ("no tokenizer.json" if name == "tokenizer.json" else f"{copy} has no weights") in refusal(copy, tmp_path / "state")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_broken_json_is_named(copy: Path, name: str, text: str, tmp_path: Path) -> None:
    (copy / name).write_text(text, encoding="latin-1")
    assert str(copy / name) in refusal(copy, tmp_path / "state")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_safetensors_is_named(copy: Path, keep: int, tmp_path: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert str(file) in refusal(copy, tmp_path / "state")


def test_corrupt_safetensors_header_is_named(copy: Path, tmp_path: Path) -> None:
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    file.write_bytes(data)
    assert refusal(copy, tmp_path / "state") == f"{file} has a broken safetensors header"


def test_missing_shard_is_named(copy: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors is missing" in refusal(copy, tmp_path / "state")


def test_pickled_weights_are_not_loaded(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "PyTorch pickles are not loaded" in refusal(copy, tmp_path / "state")


def test_state_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "a.gguf")
    (tmp_path / "state").write_text("a file")
    assert "cannot use model" in refusal(file, tmp_path / "state")


# ---- the test support itself


def test_tiny_folder_is_what_transformers_reads(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    assert model.dtype == torch.float32
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the sea"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(chat, return_tensors="pt").input_ids
    assert ids[0, 0] == 1
    with torch.inference_mode():
        logits = model(ids).logits[0]
    assert logits.shape == (ids.shape[1], 320)
    best = logits.topk(2).values
    assert float((best[:, 0] - best[:, 1]).median()) > 0.05  # greedy output does not hang on rounding


def test_tiny_folder_is_the_same_each_time(tiny: Path, tmp_path: Path) -> None:
    assert (tiny_llama_folder(tmp_path / "again") / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    other = tiny_llama_folder(tmp_path / "other", seed=1, num_hidden_layers=2)
    assert json.loads((other / "config.json").read_text())["num_hidden_layers"] == 2
