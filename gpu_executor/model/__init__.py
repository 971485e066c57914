"""Hugging Face causal language models, their attention replaced by the paged kernels."""
