"""Tiny, randomly initialised Hugging Face models, one for each architecture that capture has to cope with.

Every entry trains one full eager step in a few milliseconds on CPU. Nothing is downloaded: models come from a
configuration. Dropout is on wherever the architecture has it, so that random streams are part of every comparison.
`transformers` is imported on first use only, which keeps test collection fast.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 64
BATCH = 2
SEQUENCE = 8
DROPOUT = 0.1
IGNORED = -100

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ZooModel:
    """One architecture: how to build it, and batches to train it on."""

    name: str
    make: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator, str], Batch]
    dtype: torch.dtype = torch.float32
    has_dropout: bool = True
    has_batchnorm: bool = False
    has_cross_attention: bool = False
    supports_checkpointing: bool = True
    masks: tuple[str, ...] = ("none", "padded")

    def build(self) -> nn.Module:
        """A fresh model in train mode; its weights depend on the global random state only."""
        model = self.make()
        spread_weights(model)
        return model.train()

    def batch(self, seed: int = 0, mask: str = "none") -> Batch:
        """Keyword arguments for `model(**batch)`, labels included; leaves the global random state alone.

        With `mask="padded"` the rows have different lengths: the tail is padding, masked out and unlabelled.
        """
        if mask not in self.masks:
            raise ValueError(f"{self.name} has no mask {mask!r}, only {self.masks}")
        batch = self.make_batch(torch.Generator().manual_seed(seed), mask)
        return {key: value.to(self.dtype) if value.is_floating_point() else value for key, value in batch.items()}

    def enable_checkpointing(self, model: nn.Module, use_reentrant: bool) -> None:
        """Turns on the model's own activation checkpointing, as its users do.

        Reentrant regions lose the gradients of everything inside when no input of theirs requires one. That happens
        only where the input embeddings are frozen, so freeze before the call; then they are made to require gradients.
        """
        if not self.supports_checkpointing:
            raise ValueError(f"{self.name} has no activation checkpointing")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the older name is deprecated, and still the common one
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        embeddings = model.get_input_embeddings()
        if use_reentrant and not all(parameter.requires_grad for parameter in embeddings.parameters()):
            model.enable_input_require_grads()


def spread_weights(model: nn.Module) -> None:
    """Perturbs parameters that start at one constant (biases, norm weights, tokens), which would hide mix-ups."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype), alpha=0.1)


def _ids(generator: torch.Generator, length: int = SEQUENCE) -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, length), generator=generator)


def _padding(length: int = SEQUENCE) -> Tensor:
    """Ones, then zeros in the tail: row i has `length - 1 - 2 * i` tokens."""
    lengths = torch.tensor([max(1, length - 1 - 2 * row) for row in range(BATCH)])
    return (torch.arange(length) < lengths[:, None]).long()


def _language_batch(generator: torch.Generator, mask: str) -> Batch:
    ids = _ids(generator)
    if mask == "none":
        return {"input_ids": ids, "labels": ids.clone()}
    attended = _padding()
    return {
        "input_ids": ids.masked_fill(attended == 0, 0),
        "attention_mask": attended,
        "labels": ids.masked_fill(attended == 0, IGNORED),
    }


def _masked_language_batch(generator: torch.Generator, mask: str) -> Batch:
    batch = _language_batch(generator, mask)
    hidden = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool)
    hidden[:, ::3] = True
    batch["labels"] = batch["labels"].masked_fill(~hidden, IGNORED)
    batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 1)
    batch["token_type_ids"] = (torch.arange(SEQUENCE) >= SEQUENCE // 2).long().expand(BATCH, SEQUENCE).contiguous()
    return batch


def _translation_batch(generator: torch.Generator, mask: str) -> Batch:
    labels = _ids(generator, SEQUENCE - 2)
    batch = _language_batch(generator, mask)
    if mask == "padded":
        labels = labels.masked_fill(_padding(SEQUENCE - 2) == 0, IGNORED)
    return {**batch, "labels": labels}


def _image_batch(generator: torch.Generator, mask: str) -> Batch:
    return {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (BATCH,), generator=generator),
    }


def _speech_batch(generator: torch.Generator, mask: str) -> Batch:
    labels = _ids(generator)
    batch = {"input_features": torch.randn(BATCH, 8, 32, generator=generator), "labels": labels}
    if mask == "padded":
        attended = _padding()
        batch["labels"] = labels.masked_fill(attended == 0, IGNORED)
        batch["decoder_attention_mask"] = attended
    return batch


def _from_config(auto: str, config: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    import transformers

    return getattr(transformers, auto).from_config(getattr(transformers, config)(**options), dtype=dtype)


def _gpt2() -> nn.Module:
    return _from_config(
        "AutoModelForCausalLM",
        "GPT2Config",
        vocab_size=VOCAB,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=DROPOUT,
        embd_pdrop=DROPOUT,
        attn_pdrop=DROPOUT,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        loss_type="ForCausalLM",
    )


def _decoder(config: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """The Llama family: rotary positions, grouped-query attention, gated MLP; dropout in attention only."""
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 16,
        "attention_dropout": DROPOUT,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    return _from_config("AutoModelForCausalLM", config, dtype, **{**shared, **options})


def _llama() -> nn.Module:
    return _decoder("LlamaConfig")


def _qwen3() -> nn.Module:
    return _decoder("Qwen3Config", tie_word_embeddings=True)


def _gemma2() -> nn.Module:
    return _decoder("Gemma2Config", sliding_window=4, query_pre_attn_scalar=8)


def _mixtral() -> nn.Module:
    return _decoder("MixtralConfig", torch.bfloat16, num_local_experts=4, num_experts_per_tok=2)


def _bert() -> nn.Module:
    return _from_config(
        "AutoModelForMaskedLM",
        "BertConfig",
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        initializer_range=0.2,
    )


def _t5() -> nn.Module:
    return _from_config(
        "AutoModelForSeq2SeqLM",
        "T5Config",
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=DROPOUT,
        decoder_start_token_id=0,
        use_cache=False,
    )


def _vit() -> nn.Module:
    return _from_config(
        "AutoModelForImageClassification",
        "ViTConfig",
        image_size=16,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        initializer_range=0.2,
        num_labels=5,
    )


def _resnet() -> nn.Module:
    return _from_config(
        "AutoModelForImageClassification",
        "ResNetConfig",
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        layer_type="bottleneck",
        num_labels=5,
    )


def _whisper() -> nn.Module:
    return _from_config(
        "AutoModelForSpeechSeq2Seq",
        "WhisperConfig",
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=16,
        max_target_positions=16,
        dropout=DROPOUT,
        attention_dropout=DROPOUT,
        activation_dropout=DROPOUT,
        init_std=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )


def _mamba() -> nn.Module:
    return _from_config(
        "AutoModelForCausalLM",
        "MambaConfig",
        vocab_size=VOCAB,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        use_cache=False,
    )


ZOO: dict[str, ZooModel] = {
    entry.name: entry
    for entry in (
        ZooModel("gpt2", _gpt2, _language_batch),
        ZooModel("llama", _llama, _language_batch),
        ZooModel("qwen3", _qwen3, _language_batch),
        ZooModel("gemma2", _gemma2, _language_batch),
        ZooModel("bert", _bert, _masked_language_batch),
        ZooModel("t5", _t5, _translation_batch, has_cross_attention=True),
        ZooModel("vit", _vit, _image_batch, masks=("none",)),
        ZooModel(
            "resnet",
            _resnet,
            _image_batch,
            has_dropout=False,
            has_batchnorm=True,
            supports_checkpointing=False,
            masks=("none",),
        ),
        ZooModel("whisper", _whisper, _speech_batch, has_cross_attention=True),
        ZooModel("mamba", _mamba, _language_batch, has_dropout=False),
        ZooModel("mixtral", _mixtral, _language_batch, dtype=torch.bfloat16),
    )
}
