"""An assembled `neighbours` model as a standard checkpoint that other people's tools read.

Our decoder layer is Qwen3's (RMSNorm, RoPE by halves, QK-norm, SwiGLU, no biases) by other names.

    config.json              what `transformers` builds the model from; written last
    generation_config.json   so that `generate` begins as we do
    model.safetensors        every block's layers, and the last block's head
    README.md                what a token is
    *.py                     vectors for runs of bytes, which Qwen3 does not have; if there are any
"""

from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save
from torch import Tensor

from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import CannotExport
from blocktrain.learning.model import EPSILON, ROPE_BASE, START, VOCABULARY, Model, Shape

LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}

OURS = ("embedding.py", "modeling_blocktrain.py")  # what Qwen3 lacks, as code for `transformers`

README = f"""# A byte-level language model

KIND, exported by BlockTrain. It has no tokenizer, because it needs none:

- a token is one raw byte, 0 to 255, and UTF-8 text is its bytes;
- every text begins after byte {START} (a newline): put it first, and do not count it.

```python
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("."TRUST)
tokens = torch.tensor([[{START}, *"The ".encode()]])
print(bytes(model.generate(tokens, max_new_tokens=100)[0, 1:].tolist()).decode(errors="replace"))
```

It sees at most `max_position_embeddings` bytes at once (config.json). Texts of a batch should be of
one length: what pads them would be read as bytes.
"""


def export_hf(model: Model, folder: Path) -> None:
    """Writes the model as a `transformers` checkpoint (Qwen3ForCausalLM)."""
    if model.shape.objective != "neighbours":
        raise CannotExport(
            f"A {model.shape.objective} model has no standard form, as its blocks pass on noisy "
            "codes; export a model trained with --objective neighbours."
        )
    runs = model.shape.grams > 1
    config = as_json(qwen3_config(model.shape) | (own_config(model.shape) if runs else {}))
    with errors_are_clear(folder):
        refuse_another(folder, config)
        folder.mkdir(parents=True, exist_ok=True)
        body = save(qwen3_tensors(model), metadata={"format": "pt"})
        write_atomically(folder / "model.safetensors", body)
        write_atomically(folder / "generation_config.json", as_json(generation_config()))
        if not (folder / "README.md").exists():  # it may be somebody's own
            write_atomically(folder / "README.md", readme(runs).encode())
        for name in OURS if runs else ():
            write_atomically(folder / name, Path(__file__).with_name(name).read_bytes())
        write_atomically(folder / "config.json", config)


def refuse_another(folder: Path, config: bytes) -> None:
    """An export cut off over one of another shape would leave a mix that loads without a word."""
    found = folder / "config.json"
    if found.exists() and found.read_bytes() != config:
        raise CannotExport(
            f"{folder} holds a checkpoint of another shape; remove it or choose another folder."
        )


def qwen3_config(shape: Shape) -> dict[str, Any]:
    """What `transformers` 4.51 and later needs to build this shape."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.blocks * shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.width // shape.heads,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},  # from 5.0
        "rope_theta": ROPE_BASE,  # before 5.0
        "max_position_embeddings": shape.window,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "bos_token_id": START,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def own_config(shape: Shape) -> dict[str, Any]:
    """What is different where runs of bytes have vectors: another class, from files beside it."""
    return {
        "architectures": ["BlockTrainForCausalLM"],
        "model_type": "blocktrain",
        "auto_map": {
            "AutoConfig": "modeling_blocktrain.BlockTrainConfig",
            "AutoModelForCausalLM": "modeling_blocktrain.BlockTrainForCausalLM",
        },
        "grams": shape.grams,
        "gram_rows": shape.gram_rows,
    }


def readme(runs: bool) -> str:
    """What people are told beside the checkpoint."""
    kind = "Qwen3 with vectors for runs of bytes (the Python files here)"
    kind = kind if runs else "A standard Qwen3 checkpoint"
    return README.replace("KIND", kind).replace("TRUST", ", trust_remote_code=True" * runs)


def generation_config() -> dict[str, Any]:
    """Text begins after a newline and has no end of its own."""
    return {"bos_token_id": START, "do_sample": True, "temperature": 0.8}


def qwen3_tensors(model: Model) -> dict[str, Tensor]:
    """Every weight under Qwen3's name."""
    first, last = model.blocks[0], model.blocks[-1]
    tensors = {
        "model.embed_tokens.weight": first.embed.weight,
        "model.norm.weight": last.head.norm.weight,
        "lm_head.weight": last.head.out.weight,
    }
    if model.shape.grams > 1:
        tensors["model.embed_tokens.runs"] = first.embed.runs
    layers = [layer for block in model.blocks for layer in block.layers]
    for number, layer in enumerate(layers):
        for name, weight in layer.named_parameters():
            theirs = LAYER_NAMES[name.removesuffix(".weight")]
            tensors[f"model.layers.{number}.{theirs}.weight"] = weight
    return {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}


def as_json(value: dict[str, Any]) -> bytes:
    """For people too: indented."""
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"
