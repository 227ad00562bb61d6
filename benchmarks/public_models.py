"""Public architectures with random weights, at sizes for a GPU and for a CPU: the rows of `benchmarks.public`.

A builder takes `small`. If it is true, the model is narrower where its size is free, and the inputs are one or two
images of at most 224 pixels or sequences of at most 128 tokens: a step of 0.05 to 1 s on two cores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]
Maker = Callable[[bool], tuple[nn.Module, Inputs]]
InputMaker = Callable[[bool], Inputs]
_ANSWERS = (
    "logits", "last_hidden_state", "image_embeds", "text_embeds", "pooler_output", "sample", "logits_per_image",
    "predicted_depth",
)  # fmt: skip
_BLOCKS = ("torchvision", "flash_attn", "xformers")  # that `diffusers` imports where it finds them


@dataclass(frozen=True)
class Row:
    """`make(small)` gives a module and its arguments by name. Floats are `dtype` on a GPU."""

    name: str
    make: Maker
    dtype: torch.dtype = torch.bfloat16
    trains: bool = True


class _Called(nn.Module):
    """A model that returns its tensors alone."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        super().__init__()
        self.model, self.fixed = model, fixed

    def forward(self, *args: Any, **given: Any) -> Any:
        out = self.model(*args, **given, **self.fixed)
        if isinstance(out, (tuple, torch.Tensor)):
            return out
        return {name: value for name, value in out.items() if name in _ANSWERS}


def _ids(batch: int, length: int, words: int = 30000) -> torch.Tensor:
    return torch.randint(0, words, (batch, length))


def _few(batch: int, small: bool) -> int:
    return min(batch, 2) if small else batch


def _transformer(
    kind: str, config: str, settings: dict[str, Any], inputs: InputMaker, small_settings: dict[str, Any] | None = None
) -> Maker:
    """A model of `transformers` without dropout."""

    def make(small: bool) -> tuple[nn.Module, Inputs]:
        import transformers

        made = getattr(transformers, config)(**settings | ((small_settings or {}) if small else {}))
        for name, value in vars(made).items():
            if isinstance(value, float) and ("drop" in name or name.startswith("mask_")):
                setattr(made, name, 0.0)
        model = getattr(transformers, kind)
        return _Called(model._from_config(made) if hasattr(model, "_from_config") else model(made)), inputs(small)

    return make


def _timm(name: str, batch: int, size: int = 224) -> Maker:
    def make(small: bool) -> tuple[nn.Module, Inputs]:
        import timm

        side = min(size, 224) if small else size
        return timm.create_model(name, pretrained=False), {"x": torch.randn(_few(batch, small), 3, side, side)}

    return make


@contextmanager
def _without(*packages: str) -> Iterator[None]:
    """`importlib` does not find these packages, which may be made for another torch."""
    real = importlib.util.find_spec
    importlib.util.find_spec = lambda n, *a: None if n.split(".")[0] in packages else real(n, *a)
    try:
        yield
    finally:
        importlib.util.find_spec = real


def _diffusion(
    kind: str, settings: dict[str, Any], inputs: InputMaker, small_settings: dict[str, Any] | None = None
) -> Maker:
    """A model of `diffusers`."""

    def make(small: bool) -> tuple[nn.Module, Inputs]:
        with _without(*_BLOCKS):
            import diffusers

            model = getattr(diffusers, kind)(**settings | ((small_settings or {}) if small else {}))
        return _Called(model, return_dict=False), inputs(small)

    return make


_DECODER = {
    "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32000, "use_cache": False,
}  # fmt: skip
_NARROW = {"hidden_size": 1024, "num_attention_heads": 8}
_FOUR = {"num_hidden_layers": 4}


def _words(batch: int, length: int) -> InputMaker:
    return lambda small: {"input_ids": _ids(_few(batch, small), min(length, 128) if small else length)}


def _both(batch: int, length: int) -> InputMaker:
    """For an encoder and a decoder."""

    def make(small: bool) -> Inputs:
        few, tokens = _few(batch, small), min(length, 128) if small else length
        return {"input_ids": _ids(few, tokens), "decoder_input_ids": _ids(few, tokens // 4)}

    return make


def _images(batch: int, size: int, small_size: int = 224) -> InputMaker:
    def make(small: bool) -> Inputs:
        side = small_size if small else size
        return {"pixel_values": torch.randn(1 if small else batch, 3, side, side)}

    return make


def _decoder(kind: str, config: str, **more: Any) -> Maker:
    return _transformer(
        f"{kind}ForCausalLM", config, {**_DECODER, **more}, _words(4, 1024), {**_NARROW, "intermediate_size": 2752}
    )


def _named(**settings: Any) -> dict[str, Any]:
    return settings


_WIDE = _named(hidden_size=2048, num_hidden_layers=4, num_attention_heads=16, vocab_size=50432, use_cache=False)
_SPEECH = _named(
    d_model=768, encoder_layers=4, decoder_layers=4, encoder_attention_heads=12, decoder_attention_heads=12,
    encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False,
)  # fmt: skip
_DISENTANGLED = _named(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=3, num_attention_heads=12, vocab_size=30522,
    relative_attention=True, max_relative_positions=-1, position_buckets=256, pos_att_type=["p2c", "c2p"],
)  # fmt: skip
_PYRAMID = _named(depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 320, 512], num_labels=150, decoder_hidden_size=256)
_CODER = _named(
    block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2,
)  # fmt: skip
_STABLE = _named(
    sample_size=128, num_layers=3, num_attention_heads=24, in_channels=16, joint_attention_dim=4096,
    caption_projection_dim=1536, pooled_projection_dim=2048, pos_embed_max_size=192,
)  # fmt: skip
_TOKENS = _named(num_attention_heads=16, attention_head_dim=72, in_channels=4, num_layers=4, sample_size=32)


def _flow_inputs(small: bool) -> Inputs:
    places, words = (256, 64) if small else (4096, 512)
    return {
        "hidden_states": torch.randn(1, places, 64), "encoder_hidden_states": torch.randn(1, words, 4096),
        "pooled_projections": torch.randn(1, 768), "timestep": torch.rand(1), "guidance": torch.rand(1),
        "img_ids": torch.randn(places, 3), "txt_ids": torch.randn(words, 3),
    }  # fmt: skip


def _stable_inputs(small: bool) -> Inputs:
    batch, side, words = (1, 32, 77) if small else (2, 128, 333)
    return {
        "hidden_states": torch.randn(batch, 16, side, side), "encoder_hidden_states": torch.randn(batch, words, 4096),
        "pooled_projections": torch.randn(batch, 2048), "timestep": torch.rand(batch),
    }  # fmt: skip


def _token_inputs(small: bool) -> Inputs:
    batch = _few(32, small)
    labels = {"timestep": _ids(1, batch, 1000)[0], "class_labels": _ids(1, batch, 1000)[0]}
    return {"hidden_states": torch.randn(batch, 4, 32, 32), **labels}


def _speech_inputs(small: bool) -> Inputs:
    batch = 1 if small else 8
    return {"input_features": torch.randn(batch, 80, 3000), "decoder_input_ids": _ids(batch, 32 if small else 128)}


def _wave_inputs(small: bool) -> Inputs:
    return {"input_values": torch.randn(*((1, 32000) if small else (8, 160000)))}


def _pair_inputs(small: bool) -> Inputs:
    batch = _few(64, small)
    return {"input_ids": _ids(batch, 77), "pixel_values": torch.randn(batch, 3, 224, 224)}


def _picture_inputs(small: bool) -> Inputs:
    side = 64 if small else 512
    return {"sample": torch.randn(1, 3, side, side)}


def _noise_inputs(small: bool) -> Inputs:
    batch, side = (1, 32) if small else (16, 64)
    return {"sample": torch.randn(batch, 3, side, side), "timestep": _ids(1, batch, 1000)[0]}


F32 = torch.float32
ROWS = (
    Row("llama", _decoder("Llama", "LlamaConfig")),
    Row("qwen3", _decoder("Qwen3", "Qwen3Config", head_dim=128)),
    Row("gemma2", _decoder("Gemma2", "Gemma2Config", head_dim=128)),
    Row("gemma3", _decoder("Gemma3", "Gemma3TextConfig", head_dim=128)),
    Row("mistral", _decoder("Mistral", "MistralConfig", sliding_window=512)),
    Row("phi3", _decoder("Phi3", "Phi3Config", pad_token_id=0)),
    Row("olmo2", _decoder("Olmo2", "Olmo2Config")),
    Row("mixtral", _decoder("Mixtral", "MixtralConfig", num_local_experts=4, num_hidden_layers=2)),
    Row("gpt_neox", _transformer("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_WIDE, "intermediate_size": 8192},
                                 _words(4, 1024), {**_NARROW, "intermediate_size": 4096})),
    Row("opt", _transformer("OPTForCausalLM", "OPTConfig", {**_WIDE, "ffn_dim": 8192, "word_embed_proj_dim": 2048},
                            _words(4, 1024), {**_NARROW, "ffn_dim": 4096, "word_embed_proj_dim": 1024})),
    Row("bloom", _transformer("BloomForCausalLM", "BloomConfig",
                              _named(hidden_size=2048, n_layer=4, n_head=16, vocab_size=50304, use_cache=False),
                              _words(4, 1024), _named(hidden_size=1024, n_head=8))),
    Row("mamba", _transformer("MambaForCausalLM", "MambaConfig",
                              _named(hidden_size=1024, num_hidden_layers=2, vocab_size=32000, use_cache=False),
                              _words(2, 128))),
    Row("t5", _transformer("T5ForConditionalGeneration", "T5Config",
                           _named(d_model=768, d_ff=2048, num_layers=4, num_heads=12, use_cache=False,
                                  feed_forward_proj="gated-gelu"), _both(8, 512))),
    Row("bart", _transformer("BartForConditionalGeneration", "BartConfig",
                             _named(encoder_layers=3, decoder_layers=3, use_cache=False), _both(8, 512))),
    Row("deberta", _transformer("DebertaV2ForMaskedLM", "DebertaV2Config", _DISENTANGLED, _words(16, 256))),
    Row("modernbert", _transformer("ModernBertForMaskedLM", "ModernBertConfig",
                                   _named(num_hidden_layers=6, reference_compile=False, attn_implementation="sdpa"),
                                   _words(16, 512))),
    Row("electra", _transformer("ElectraForMaskedLM", "ElectraConfig",
                                _named(hidden_size=768, intermediate_size=3072, num_hidden_layers=4,
                                       num_attention_heads=12, embedding_size=768), _words(32, 256))),
    Row("clip", _transformer("CLIPModel", "CLIPConfig", {}, _pair_inputs)),
    Row("siglip", _transformer("SiglipVisionModel", "SiglipVisionConfig", _FOUR, _images(64, 224))),
    Row("whisper", _transformer("WhisperForConditionalGeneration", "WhisperConfig", _SPEECH, _speech_inputs)),
    Row("wav2vec2", _transformer("Wav2Vec2Model", "Wav2Vec2Config", _FOUR,
                                 _wave_inputs)),
    Row("sam", _transformer("SamVisionModel", "SamVisionConfig", _FOUR, _images(2, 1024, 256), {"image_size": 256}),
        trains=False),
    Row("segformer", _transformer("SegformerForSemanticSegmentation", "SegformerConfig", _PYRAMID, _images(16, 512))),
    Row("dinov2", _transformer("Dinov2Model", "Dinov2Config", {**_FOUR, "image_size": 518}, _images(16, 518))),
    Row("dpt", _transformer("DPTForDepthEstimation", "DPTConfig",
                            {**_FOUR, "backbone_out_indices": [0, 1, 2, 3], "image_size": 384}, _images(8, 384),
                            {"image_size": 224}),
        trains=False),
    Row("swin", _timm("swin_tiny_patch4_window7_224", 64)),
    Row("efficientnet_b3", _timm("efficientnet_b3", 32, 288), F32),
    Row("mobilevit", _timm("mobilevit_s", 64, 256)),
    Row("mobilenetv4", _timm("mobilenetv4_conv_medium", 64, 256)),
    Row("regnety", _timm("regnety_032", 64)),
    Row("resnext50", _timm("resnext50_32x4d", 64)),
    Row("mixer", _timm("mixer_b16_224", 64)),
    Row("convnextv2", _timm("convnextv2_tiny", 64)),
    Row("poolformer", _timm("poolformer_s12", 64)),
    Row("coatnet", _timm("coatnet_0_rw_224", 64)),
    Row("maxvit", _timm("maxvit_tiny_tf_224", 32)),
    Row("eva02", _timm("eva02_base_patch14_224", 64)),
    Row("nfnet", _timm("dm_nfnet_f0", 32)),
    Row("hrnet", _timm("hrnet_w18", 32)),
    Row("flux", _diffusion("FluxTransformer2DModel", _named(num_layers=1, num_single_layers=2, guidance_embeds=True),
                           _flow_inputs), trains=False),
    Row("sd3", _diffusion("SD3Transformer2DModel", _STABLE, _stable_inputs), trains=False),
    Row("dit", _diffusion("DiTTransformer2DModel", {**_TOKENS, "out_channels": 8}, _token_inputs)),
    Row("vae", _diffusion("AutoencoderKL", _CODER, _picture_inputs), F32, False),
    Row("unet2d", _diffusion("UNet2DModel", {"sample_size": 64},
                             _noise_inputs, {"sample_size": 32, "block_out_channels": (64, 128, 192, 256)}), F32),
)  # fmt: skip
