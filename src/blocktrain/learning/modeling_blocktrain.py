"""What an exported model with vectors for runs of bytes brings along: Qwen3 with our embedding.

`transformers` imports this file from the export's folder (`trust_remote_code=True`), where a copy
of embedding.py lies beside it. Nothing else here does: BlockTrain does not need `transformers`.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from .embedding import NOTHING, Embedding


class BlockTrainConfig(Qwen3Config):  # type: ignore[misc]
    """Of a name of its own, so that nobody opens the model without its vectors of runs."""

    model_type = "blocktrain"
    grams: int = 1
    gram_rows: int = 1


class BlockTrainForCausalLM(Qwen3ForCausalLM):  # type: ignore[misc]
    """Qwen3 over bytes, to which runs of bytes mean something too."""

    config_class = BlockTrainConfig

    def __init__(self, config: BlockTrainConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, config.grams, config.gram_rows
        )

    def vectors(self, input_ids: Tensor) -> Tensor:
        """Of a text from its beginning."""
        embed = self.model.embed_tokens
        found: Tensor = embed(F.pad(input_ids, (embed.reach, 0), value=NOTHING))
        return found

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> Any:
        """As Qwen3's; the rest of a text needs `inputs_embeds`, which know what came before."""
        if inputs_embeds is None:
            if past_key_values is not None and past_key_values.get_seq_length():
                raise ValueError(
                    "A run of bytes may begin in what is cached; give inputs_embeds, the last of "
                    "model.vectors(all ids), or call generate, which does."
                )
            assert input_ids is not None, "Qwen3 wants input_ids or inputs_embeds"
            inputs_embeds = self.vectors(input_ids)
        return super().forward(inputs_embeds=inputs_embeds, past_key_values=past_key_values, **more)

    def prepare_inputs_for_generation(self, input_ids: Tensor, *told: Any, **more: Any) -> Any:
        """One step of `generate`, which knows the whole text."""
        inputs = super().prepare_inputs_for_generation(input_ids, *told, **more)
        new = inputs.pop("input_ids").shape[1]
        return inputs | {"inputs_embeds": self.vectors(input_ids)[:, -new:]}
