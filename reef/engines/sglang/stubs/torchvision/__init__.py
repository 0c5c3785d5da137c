"""torchvision, which SGLang's image models import: an import stub."""

from reef.engines.sglang.import_only import stub

__version__ = "0+stub"
stub(__name__)
