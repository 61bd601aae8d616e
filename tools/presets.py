"""Jobs that the command line knows by name. Weights are random; Hugging Face models come from a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError

Parts = tuple[nn.Module, torch.optim.Optimizer, Any, dict[str, Any]]


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model of the transformers library.

    Attributes:
        kind: the auto class, such as ``AutoModelForCausalLM``.
        config: the configuration class, such as ``LlamaConfig``.
        sizes: its arguments.
        inputs: shape of ``input_ids`` or ``pixel_values``.
        labels: shape of ``labels`` where it is not that of the inputs.
        dtype: of the parameters.
        device: ``"meta"`` for models that are looked at without weights.
    """

    kind: str
    config: str
    sizes: dict[str, Any]
    inputs: tuple[int, ...] = (2, 32)
    labels: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model in train mode, and a batch for ``model(**batch)``."""
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise ConfigError(
                "this preset is a model of Hugging Face; install transformers (pip install transformers)"
            ) from error
        config = getattr(transformers, self.config)(**self.sizes)
        with torch.device(self.device):
            model = getattr(transformers, self.kind).from_config(config, dtype=self.dtype)
        generator = torch.Generator().manual_seed(0)
        if len(self.inputs) == 4:
            images = torch.randn(self.inputs, generator=generator).to(self.dtype)
            classes = torch.randint(0, self.sizes["num_labels"], self.labels or self.inputs[:1], generator=generator)
            return model.train(), {"pixel_values": images, "labels": classes}
        ids = torch.randint(3, config.vocab_size, self.inputs, generator=generator)
        labels = torch.randint(3, config.vocab_size, self.labels or self.inputs, generator=generator)
        return model.train(), {"input_ids": ids.to(self.device), "labels": labels.to(self.device)}


def _decoder(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False, **more,
    }  # fmt: skip


_ENCODER = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip
_HUGGING_FACE = {
    "gpt2": HuggingFaceModel("AutoModelForCausalLM", "GPT2Config", {"use_cache": False}, (1, 128)),
    "llama-tiny": HuggingFaceModel("AutoModelForCausalLM", "LlamaConfig", _decoder()),
    "bert-tiny": HuggingFaceModel(
        "AutoModelForMaskedLM", "BertConfig", {"vocab_size": 256, "max_position_embeddings": 64, **_ENCODER}
    ),
    "t5-tiny": HuggingFaceModel(
        "AutoModelForSeq2SeqLM",
        "T5Config",
        {
            "vocab_size": 256,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
        labels=(2, 16),
    ),  # fmt: skip
    "vit-tiny": HuggingFaceModel(
        "AutoModelForImageClassification",
        "ViTConfig",
        {"image_size": 32, "patch_size": 8, "num_labels": 10, **_ENCODER},
        (4, 3, 32, 32),
    ),
    "resnet-tiny": HuggingFaceModel(
        "AutoModelForImageClassification",
        "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "num_labels": 10},
        (4, 3, 32, 32),
    ),
    "mixtral-tiny": HuggingFaceModel(
        "AutoModelForCausalLM",
        "MixtralConfig",
        _decoder(intermediate_size=128, num_local_experts=4, num_experts_per_tok=2),
        dtype=torch.bfloat16,
    ),
    "llama-7b": HuggingFaceModel(
        "AutoModelForCausalLM",
        "LlamaConfig",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 8192,
            "use_cache": False,
        },
        (1, 8192),
        dtype=torch.bfloat16,
        device="meta",
    ),
}


@dataclass(frozen=True)
class _Preset:
    make: Callable[[], tuple[nn.Module, Any]]
    options: dict[str, Any] = field(default_factory=dict)


def _gpt_demo() -> tuple[nn.Module, Any]:
    example = importlib.import_module("..examples.gpt", __package__)
    model: nn.Module = example.GPT(example.GPTConfig())
    text = torch.randint(0, 256, (16, 65), generator=torch.Generator().manual_seed(0))
    return model, (text[:, :-1], text[:, 1:])


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


PRESETS: dict[str, _Preset] = {
    "gpt-demo": _Preset(_gpt_demo, {"criterion": _token_loss}),
    **{name: _Preset(model.build) for name, model in _HUGGING_FACE.items()},
}


def preset_parts(name: str) -> Parts:
    """Model, AdamW (fused, where there are weights), batch and options of a preset; weights are the same at every call."""
    preset = PRESETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch = preset.make()
    fused, foreach = (None, True) if next(model.parameters()).is_meta else (True, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, foreach=foreach, fused=fused)
    return model, optimizer, batch, {"max_norm": 1.0, **preset.options}
