"""What `export` writes, read by the real `transformers`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktrain.errors import CannotExport, CannotSave
from blocktrain.learning.export import export_hf
from blocktrain.learning.model import Model, Shape

MakeModel = Callable[[Shape], Model]

SHAPES = [
    Shape(blocks=1, layers=1, width=16, heads=1, window=16, grams=1),
    Shape(blocks=4, layers=1, width=32, heads=4, window=32, grams=1),
    Shape(blocks=2, layers=3, width=48, heads=2, window=24, grams=1),
    Shape(blocks=3, layers=2, width=128, heads=4, window=64, grams=1),
    Shape(blocks=2, layers=1, width=32, heads=2, window=32, grams=4, gram_rows=64),
]


def random_bytes(shape: Shape) -> Tensor:
    return torch.randint(0, 256, (2, shape.window), generator=torch.Generator().manual_seed(1))


def loaded(folder: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM  # seconds: only when these tests run

    own = {"local_files_only": True, "trust_remote_code": "blocktrain" in config_of(folder)}
    return AutoModelForCausalLM.from_pretrained(folder, **own, **settings)


def config_of(folder: Path) -> str:
    return (folder / "config.json").read_text()


def opened(folder: Path, **settings: Any) -> Any:
    return loaded(folder, **settings).eval()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.blocks}x{s.layers}x{s.width}")
@pytest.mark.parametrize("settings", [{}, {"dtype": torch.float32}], ids=["", "float32"])
def test_transformers_computes_the_same(
    tmp_path: Path, alive: MakeModel, shape: Shape, settings: dict[str, Any]
) -> None:
    model = alive(shape)
    export_hf(model, tmp_path)
    theirs = opened(tmp_path, **settings)
    tokens = random_bytes(shape)
    with torch.no_grad():
        found = theirs(tokens).logits.log_softmax(-1)
    assert next(theirs.parameters()).dtype == torch.float32
    torch.testing.assert_close(found, model.log_probabilities(tokens), atol=1e-4, rtol=0)


def test_no_weight_is_missing_or_left_over(tmp_path: Path, alive: MakeModel) -> None:
    model = alive(SHAPES[2])
    export_hf(model, tmp_path)
    _, told = loaded(tmp_path, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not told[kind]


def test_the_config_says_what_the_shape_says(tmp_path: Path, alive: MakeModel) -> None:
    shape = SHAPES[2]
    export_hf(alive(shape), tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 256,
        "hidden_size": 48,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 24,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    assert expected.items() <= told.items()
    assert told["rope_parameters"]["rope_theta"] == told["rope_theta"]
    read = opened(tmp_path).config
    assert read.rope_parameters["rope_theta"] == 10_000.0
    assert read.rms_norm_eps == 1e-6


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[-1]], ids=["bytes", "runs"])
def test_generation_begins_after_a_newline_and_goes_on_with_bytes(
    tmp_path: Path, alive: MakeModel, shape: Shape
) -> None:
    export_hf(alive(shape), tmp_path)
    theirs = opened(tmp_path)
    made = theirs.generate(torch.tensor([[10, *b"The "]]), max_new_tokens=8)
    assert made.shape == (1, 13)
    assert 0 <= int(made.min()) <= int(made.max()) <= 255
    assert int(theirs.generate(max_new_tokens=3)[0, 0]) == 10
    greedy = theirs.generate(made, max_new_tokens=8, do_sample=False)
    for end in range(13, 21):  # what a cache remembers is what a whole pass says
        likeliest = alive(shape).log_probabilities(greedy[:, :end])[0, -1].argmax()
        assert int(greedy[0, end]) == int(likeliest)


def test_people_are_told_what_a_token_is(tmp_path: Path, alive: MakeModel) -> None:
    export_hf(alive(SHAPES[0]), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "raw byte, 0 to 255" in text
    assert "begins after byte 10" in text
    (tmp_path / "README.md").write_text("my own words")
    export_hf(alive(SHAPES[0]), tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own words"


def test_an_export_leaves_nothing_else_behind(tmp_path: Path, alive: MakeModel) -> None:
    for _ in range(2):  # the second time over the first
        export_hf(alive(SHAPES[0]), tmp_path / "new" / "folder")
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names == ["README.md", "config.json", "generation_config.json", "model.safetensors"]


def test_a_denoise_model_has_no_standard_form(
    tmp_path: Path, alive: MakeModel, sentence: Callable[[BaseException], str]
) -> None:
    model = alive(Shape("denoise", blocks=1, width=16, heads=2, window=8))
    with pytest.raises(CannotExport) as caught:
        export_hf(model, tmp_path)
    assert "neighbours" in sentence(caught.value)
    assert not list(tmp_path.iterdir())


def test_nobody_opens_a_model_without_its_vectors_for_runs(
    tmp_path: Path, alive: MakeModel
) -> None:
    from transformers import AutoModelForCausalLM

    export_hf(alive(SHAPES[-1]), tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)


def test_the_rest_of_a_text_is_not_taken_for_a_beginning(tmp_path: Path, alive: MakeModel) -> None:
    export_hf(alive(SHAPES[-1]), tmp_path)
    theirs, tokens = opened(tmp_path), random_bytes(SHAPES[-1])
    with torch.no_grad():
        begun = theirs(tokens[:, :9], use_cache=True).past_key_values
        with pytest.raises(ValueError, match="inputs_embeds"):
            theirs(tokens[:, 9:], past_key_values=begun)
        rest = theirs(inputs_embeds=theirs.vectors(tokens)[:, 9:], past_key_values=begun)
        whole = theirs(tokens).logits
    torch.testing.assert_close(rest.logits, whole[:, 9:], atol=1e-4, rtol=0)


def test_a_checkpoint_of_another_shape_is_not_overwritten(
    tmp_path: Path, alive: MakeModel, sentence: Callable[[BaseException], str]
) -> None:
    export_hf(alive(SHAPES[0]), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(CannotExport) as caught:
        export_hf(alive(SHAPES[1]), tmp_path)
    assert "another shape" in sentence(caught.value)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_place_that_cannot_be_written(
    tmp_path: Path, alive: MakeModel, sentence: Callable[[BaseException], str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CannotSave) as caught:
        export_hf(alive(SHAPES[0]), tmp_path / "file")
    sentence(caught.value)
