from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from headwater.config.schema import Config, ModelConfig
from headwater.core.errors import ModelError
from headwater.models.builtin.tiny import PRESETS, build_config
from headwater.models.device import auto_dtype, with_dtype
from headwater.models.load import end_token_ids, load_model, load_processor, load_tokenizer, resolve_device, save_model


def load(folder: Path | str) -> Any:
    return load_model(str(folder), dtype="float32", device="cpu", seed=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = load_model("tiny:llama", dtype="float32", device="cpu", seed=7)
    return save_model(model, load_tokenizer("tiny:llama"), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_weights_that_do_not_fit_are_told_with_both_sizes(monkeypatch):
    def fail(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("headwater.models.load.free_bytes", lambda device: 3 * 2**20)
    monkeypatch.setattr("transformers.LlamaForCausalLM.to", fail)
    with pytest.raises(ModelError, match=r"tiny:llama: its weights need 3\.\d MiB, and 3\.0 MiB are free on cpu"):
        load_model("tiny:llama", dtype="float32", device="cpu", seed=0)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_saving_and_loading_keeps_logits_and_tokens(name: str, tmp_path: Path) -> None:
    model = load_model(f"tiny:{name}", dtype="float32", device="cpu", seed=7)
    tokenizer = load_tokenizer(f"tiny:{name}")
    save_model(model, tokenizer, tmp_path / name)
    loaded, loaded_tokenizer = load(tmp_path / name), load_tokenizer(str(tmp_path / name))
    text = "  What is 12 + 34?\n<|end|> é"
    tokens = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, loaded(tokens).logits)
    # For qwen2, AutoTokenizer would exchange the pre-tokenizer and add a token.
    assert loaded_tokenizer.encode(text) == tokenizer.encode(text)
    assert len(loaded_tokenizer) == len(tokenizer)
    assert loaded_tokenizer.chat_template == tokenizer.chat_template
    assert (loaded_tokenizer.pad_token_id, loaded_tokenizer.padding_side) == (0, "left")
    assert end_token_ids(loaded, loaded_tokenizer) == (1,)
    assert not loaded.training
    assert load_processor(str(tmp_path / name)) is None
    # A resumed run exports the same files, also those that do not matter to it.
    loaded_tokenizer.save_pretrained(tmp_path / "again")
    for file in (tmp_path / "again").iterdir():
        assert file.read_bytes() == (tmp_path / name / file.name).read_bytes(), file.name


def test_a_vision_model_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=sizes | heads | ids, vision_config=vision))
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    load_tokenizer("tiny:qwen3").save_pretrained(folder)
    for loader in (load, lambda path: load_processor(str(path))):
        with pytest.raises(ModelError, match="vision models of type qwen2_vl are not supported; use a text model, or"):
            loader(folder)


def test_dtype_is_converted(saved: Path) -> None:
    model = load_model(str(saved), dtype="bfloat16", device="cpu", seed=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(str(folder)).pad_token_id == 1


def test_missing_folder(tmp_path: Path) -> None:
    for loader in (load, load_tokenizer):
        with pytest.raises(ModelError, match=r"nowhere: no such folder; check the path"):
            loader(str(tmp_path / "nowhere"))


def test_file_instead_of_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file; give the folder"):
        load(folder / "config.json")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json; give a folder in the Hugging Face format"):
        load(folder)


def test_unreadable_config(folder: Path) -> None:
    for text in (b"{", b"[]", b"\xff"):
        (folder / "config.json").write_bytes(text)
        with pytest.raises(ModelError, match=r"config\.json: "):
            load(folder)


def test_nonsense_in_config(folder: Path) -> None:
    original = (folder / "config.json").read_text()
    for changes in (
        {"model_type": "no-such"},
        {"hidden_size": "wide"},
        {"num_attention_heads": 7},
        {"hidden_act": "none"},
    ):
        (folder / "config.json").write_text(original)
        edit_config(folder, **changes)
        with pytest.raises(ModelError, match=str(folder)):
            load(folder)


def test_architecture_that_continues_no_text(folder: Path) -> None:
    for model_type, architecture in (
        ("bert", "BertForMaskedLM"),
        ("llama", "LlamaForSequenceClassification"),
        ("t5", "T5ForConditionalGeneration"),
    ):
        edit_config(folder, model_type=model_type, architectures=[architecture])
        with pytest.raises(ModelError, match=rf"config\.json: architecture {architecture} is not a causal language"):
            load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights; model\.safetensors"):
        load(folder)


def test_truncated_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    for num_bytes in (100_000, 100, 4, 0):
        file.write_bytes(file.read_bytes()[:num_bytes])
        with pytest.raises(ModelError, match=r"model\.safetensors: is damaged or truncated .*; copy the model folder"):
            load(folder)


def test_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: is missing"):
        load(folder)


def test_unusable_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for text in ("{}", '{"weight_map": {}}', "{"):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
            load(folder)


def test_sharded_weights_load(saved: Path, tmp_path: Path) -> None:
    model = load(saved)
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load(tmp_path).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_missing_key_is_not_made_up(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"do not fit config\.json: missing model\.layers\.2\.mlp\.up_proj\.weight;"):
        load(folder)


def test_many_missing_keys_are_summed_up(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=5)
    with pytest.raises(ModelError, match=r"missing model\.layers\.4\.[\w.]+, [\w.]+, [\w.]+ and 6 more"):
        load(folder)


def test_unexpected_key(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 2)}))
    with pytest.raises(ModelError, match=r"unexpected score\.weight"):
        load(folder)


def test_wrong_shape(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"wrong shape: model\.norm\.weight has shape \(64,\), not \(128,\)"):
        load(folder)


def test_no_tokenizer(folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    load(folder)
    with pytest.raises(ModelError, match="has no tokenizer; copy the tokenizer files"):
        load_tokenizer(str(folder))


def test_damaged_tokenizer(folder: Path) -> None:
    for text in ("{", "{}", '{"model": {"type": "Unheard"}}'):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(ModelError, match=str(folder)):
            load_tokenizer(str(folder))


def test_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    config = build_config(PRESETS["llama"])
    config.vocab_size = 300
    save_model(LlamaForCausalLM(config), load_tokenizer("tiny:llama"), tmp_path / "model")
    with pytest.raises(ModelError, match="token id 511, but the model has only 300 embeddings"):
        load_tokenizer(str(tmp_path / "model"))


def test_hub_model_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for loader in (load, load_tokenizer, load_processor):
        with pytest.raises(ModelError, match=r"nobody/nothing: no such folder in .*HF_HUB_OFFLINE is set; check the"):
            loader("nobody/nothing")


def test_bad_device() -> None:
    for device, complaint in (
        ("gpu", "model.device = gpu: not a device; use auto, cpu, cuda or cuda:N"),
        ("meta", "model.device = meta: not supported"),
        ("cuda:99", "model.device = cuda:99: "),
    ):
        with pytest.raises(ModelError, match=complaint):
            load_model("tiny:qwen3", dtype="float32", device=device, seed=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_devices_without_cuda() -> None:
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ModelError, match=r"model\.device = cuda: no CUDA device is available; use cpu or auto"):
        resolve_device("cuda")


def test_auto_is_bfloat16_only_on_gpus_that_compute_in_it(monkeypatch) -> None:
    for capability, dtype in (((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert auto_dtype(torch.device("cuda", 0)) == dtype
        assert auto_dtype(torch.device("cpu")) == torch.float32
    assert load_model("tiny:qwen3", dtype="auto", device="cpu", seed=0).dtype == torch.float32
    on_cpu = ModelConfig(device="cpu")
    assert (on_cpu.dtype, with_dtype(Config(model=on_cpu)).model.dtype) == ("auto", "float32")
    assert with_dtype(Config(model=ModelConfig(dtype="bfloat16", device="cpu"))).model.dtype == "bfloat16"


def test_bad_dtype() -> None:
    with pytest.raises(ModelError, match=r"model\.dtype = int8: unknown; use one of auto, float32, bfloat16, float16"):
        load_model("tiny:qwen3", dtype="int8", device="cpu", seed=0)


def test_end_tokens_are_merged() -> None:
    for listed, of_tokenizer, merged in (
        (1, 1, (1,)),
        ([5, 1], 1, (5, 1)),
        (5, 1, (5, 1)),
        (None, 1, (1,)),
        ([5], None, (5,)),
    ):
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=listed))
        assert end_token_ids(model, SimpleNamespace(eos_token_id=of_tokenizer)) == merged, listed


def test_a_model_without_end_token_is_refused() -> None:
    model = SimpleNamespace(generation_config=None, config=SimpleNamespace(name_or_path="mine"))
    with pytest.raises(ModelError, match="mine: has no end token"):
        end_token_ids(model, SimpleNamespace(eos_token_id=None))
