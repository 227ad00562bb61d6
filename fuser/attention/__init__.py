"""Attention with a score modification and a block mask: `torch.nn.attention.flex_attention`."""
