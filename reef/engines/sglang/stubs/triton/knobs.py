"""Triton's settings: none, as in its older versions. SGLang would hook into the loading of kernels otherwise."""

compilation = None
runtime = None
