"""Hugging Face causal language models, their attention replaced by the paged kernels."""

from gpu_executor.model.loaded import LoadedModel
from gpu_executor.model.loader import load_model
from gpu_executor.model.paged_model import PagedModel
from gpu_executor.model.sampler import sample

__all__ = ["LoadedModel", "PagedModel", "load_model", "sample"]
