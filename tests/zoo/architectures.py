"""The zoo: architectures of `transformers`, `timm` and `diffusers`, small, with random weights, nothing downloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Inputs = dict[str, torch.Tensor]
WORDS, TOKENS = 200, 12

SMALL = {
    "vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """One model: how it is built, its inputs for a batch of n, and whether it can generate text."""

    name: str
    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    generates: bool = False


ZOO: dict[str, Architecture] = {}


def _add(name: str, library: str, build: Any, inputs: Any, generates: bool = False) -> None:
    ZOO[name] = Architecture(name, library, build, inputs, generates)


_draw = 0  # which inputs of a batch size are made


@contextlib.contextmanager
def drawn(draw: int) -> Iterator[None]:
    """Inputs made inside are other ones than those of draw 0."""
    global _draw
    _draw = draw
    try:
        yield
    finally:
        _draw = 0


def _generator(n: int) -> torch.Generator:
    return torch.Generator().manual_seed(n + 1000 * _draw)


def _words(n: int, name: str = "input_ids", tokens: int = TOKENS) -> Inputs:
    return {name: torch.randint(3, WORDS, (n, tokens), generator=_generator(n))}


def _masked(n: int) -> Inputs:
    mask = torch.ones(n, TOKENS, dtype=torch.long)
    mask[0, TOKENS - 3 :] = 0
    return {**_words(n), "attention_mask": mask}


def _both(n: int) -> Inputs:
    return {**_words(n), **_words(n, "decoder_input_ids", 7)}


def _image(side: int, name: str = "pixel_values", channels: int = 3) -> Callable[[int], Inputs]:
    return lambda n: {name: torch.randn(n, channels, side, side, generator=_generator(n))}


def _sound(n: int) -> Inputs:
    return {"input_values": torch.randn(n, 1600, generator=_generator(n))}


def _transformer(
    model: str, config: str, inputs: Any = _words, generates: bool = False, attention: str = "sdpa", **settings: Any
) -> None:  # fmt: skip
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**{**SMALL, **settings})
        made._attn_implementation, made._experts_implementation = attention, "eager"
        try:
            return getattr(transformers, model)(made)
        except (ValueError, ImportError):  # no SDPA in this architecture
            made._attn_implementation = "eager"
            return getattr(transformers, model)(made)

    _add(model if attention == "sdpa" else f"{model} ({attention})", "transformers", build, inputs, generates)


def _decoder(stem: str, **settings: Any) -> None:
    _transformer(f"{stem}ForCausalLM", f"{stem}Config", _words, True, **settings)


_transformer("GPT2LMHeadModel", "GPT2Config", _words, True)
_decoder("Llama")
_decoder("Mistral", sliding_window=8)
_decoder("Qwen2")
_decoder("Qwen3", head_dim=16)
_decoder("Gemma", head_dim=16)
_decoder("Gemma2", head_dim=16, sliding_window=8)
_decoder("Phi")
_decoder("Phi3")
_decoder("GPTNeoX")
_decoder("GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2, window_size=4)
_decoder("GPTJ", rotary_dim=8)
_decoder("OPT", word_embed_proj_dim=64, ffn_dim=128)
_decoder("Bloom")
_decoder("Falcon")
_decoder("StableLm")
_decoder("Olmo")
_decoder("Olmo2")
_decoder("Starcoder2")
_decoder("Cohere")
_decoder("Granite")
_decoder("Mixtral", num_local_experts=4)
_decoder("CodeGen", rotary_dim=8, n_head=4)
_decoder("BioGpt")
for _stem, _settings in (
    ("Llama", {}), ("Mistral", {"sliding_window": 8}), ("Qwen3", {"head_dim": 16}),
    ("Gemma2", {"head_dim": 16, "sliding_window": 8}), ("Cohere", {}),
    ("OPT", {"word_embed_proj_dim": 64, "ffn_dim": 128}),
):  # fmt: skip
    _decoder(_stem, attention="flex_attention", **_settings)
_transformer("MambaForCausalLM", "MambaConfig", state_size=8)
_transformer("BertForMaskedLM", "BertConfig", _masked)
_transformer("RobertaForMaskedLM", "RobertaConfig", _masked)
_transformer("DistilBertForMaskedLM", "DistilBertConfig", _masked, dim=64, n_heads=4, n_layers=2, hidden_dim=128)
_transformer("AlbertForMaskedLM", "AlbertConfig", _masked, embedding_size=32)
_transformer("ElectraForMaskedLM", "ElectraConfig", _masked, embedding_size=32)
_transformer("DebertaV2ForMaskedLM", "DebertaV2Config", _masked, relative_attention=True, pos_att_type=["p2c", "c2p"])
_transformer("ModernBertForMaskedLM", "ModernBertConfig", _masked, local_attention=8, cls_token_id=1, sep_token_id=2)
_transformer("ModernBertForMaskedLM", "ModernBertConfig", _masked, attention="flex_attention", local_attention=8,
             cls_token_id=1, sep_token_id=2)  # fmt: skip
_transformer("MPNetForMaskedLM", "MPNetConfig", _masked)
_transformer("FNetForMaskedLM", "FNetConfig", _words)
_ED = {"d_model": 64, "decoder_start_token_id": 1, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128,
       "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4}  # fmt: skip
_transformer("T5ForConditionalGeneration", "T5Config", _both, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
             decoder_start_token_id=0)  # fmt: skip
_transformer("BartForConditionalGeneration", "BartConfig", _both, **_ED)
_transformer("MarianMTModel", "MarianConfig", _both, **_ED)
_transformer("PegasusForConditionalGeneration", "PegasusConfig", _both, **_ED)
_transformer(
    "WhisperForConditionalGeneration", "WhisperConfig",
    lambda n: {"input_features": torch.randn(n, 80, 40, generator=_generator(n)), **_words(n, "decoder_input_ids", 7)},
    **_ED, max_source_positions=20, max_target_positions=20,
)  # fmt: skip
_transformer("ViTForImageClassification", "ViTConfig", _image(32), image_size=32, patch_size=8)
_transformer("Dinov2ForImageClassification", "Dinov2Config", _image(32), image_size=32, patch_size=8)
_transformer("BeitForImageClassification", "BeitConfig", _image(32), image_size=32, patch_size=8)
_transformer("SegformerForImageClassification", "SegformerConfig", _image(64), hidden_sizes=[16, 16, 32, 32],
             depths=[1, 1, 1, 1], decoder_hidden_size=32, num_attention_heads=[1, 2, 2, 4])  # fmt: skip
_transformer("SiglipVisionModel", "SiglipVisionConfig", _image(32), image_size=32, patch_size=8)
_transformer("Wav2Vec2ForCTC", "Wav2Vec2Config", _sound, conv_dim=(32, 32, 32), conv_stride=(5, 2, 2),
             conv_kernel=(10, 3, 3), num_feat_extract_layers=3, num_conv_pos_embeddings=16,
             num_conv_pos_embedding_groups=4, mask_time_prob=0.0)  # fmt: skip


def _timm(name: str, side: int = 64, **settings: Any) -> None:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=10, **settings)

    _add(name, "timm", build, _image(side, "x"))


_timm("resnet18")
_timm("resnet50")
_timm("mobilenetv2_100")
_timm("mobilenetv3_small_100")
_timm("efficientnet_b0")
_timm("regnetx_002")
_timm("densenet121")
_timm("vgg11_bn")
_timm("convnext_atto")
_timm("ghostnet_100")
_timm("repvgg_a0")
_timm("vit_tiny_patch16_224", img_size=64, depth=2)
_timm("deit3_small_patch16_224", img_size=64, depth=2)
_timm("cait_xxs24_224", img_size=64, depth=2)
_timm("swin_tiny_patch4_window7_224", img_size=64, window_size=2, depths=(1, 1, 1, 1), embed_dim=32)
_timm("mixer_s32_224", 64, img_size=64)
_timm("poolformer_s12")
_timm("edgenext_xx_small")
_timm("mobilevit_xxs")
_timm("levit_128s", 224)


def _diffuser(model: str, inputs: Any, **settings: Any) -> None:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, model)(**settings)

    _add(model, "diffusers", build, inputs)


@dataclass(frozen=True)
class _Noise:
    """Inputs of a denoiser: an image, its time step, and what else it is given."""

    channels: int
    side: int
    more: dict[str, Any] = field(default_factory=dict)

    def __call__(self, n: int) -> Inputs:
        g = _generator(n)
        made = {"timestep": torch.randint(0, 100, (n,), generator=g)}
        name = next(iter(self.more.get("name", ["sample"])))
        made[name] = torch.randn(n, self.channels, self.side, self.side, generator=g)
        if "text" in self.more:
            made["encoder_hidden_states"] = torch.randn(n, 7, self.more["text"], generator=g)
        if "classes" in self.more:
            made["class_labels"] = torch.randint(0, self.more["classes"], (n,), generator=g)
        return made


_diffuser("UNet2DModel", _Noise(3, 16), sample_size=16, block_out_channels=(16, 32), layers_per_block=1,
          norm_num_groups=4, attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
          up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip
_diffuser("UNet2DConditionModel", _Noise(4, 16, {"text": 32}), sample_size=16, block_out_channels=(16, 32),
          layers_per_block=1, norm_num_groups=4, attention_head_dim=8, cross_attention_dim=32,
          down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
          up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"))  # fmt: skip
_diffuser("AutoencoderKL", _image(16, "sample"), block_out_channels=(16, 32), norm_num_groups=4, latent_channels=4,
          down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)  # fmt: skip
_diffuser("DiTTransformer2DModel", _Noise(4, 16, {"classes": 10, "name": ["hidden_states"]}), sample_size=16,
          num_layers=2, num_attention_heads=4, attention_head_dim=8, num_embeds_ada_norm=100)  # fmt: skip
