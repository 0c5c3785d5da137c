"""SGLang's compiled kernels, for which there is no package without CUDA: an import stub."""

from reef.engines.sglang.import_only import stub

__version__ = "0+stub"
stub(__name__)
