"""Harbor (Python 3.12, extra ``harbor``): an agent that reports its scores, a plugin that reports the verifier's.

``agent``, ``options``, ``plugin`` and ``environments`` import Harbor; the other files do without.
"""
