"""Published variants as settings: what docs/methods.md has in its table."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant by its name in the docs."""

    name: str
    implementation: str
    config: dict[str, Any]


VARIANTS = (
    Variant("SAO", "sao", {}),
    Variant("SAO for coding agents", "sao", {"dis-preset": "coding"}),
    Variant("SAO, running mean", "sao", {"advantage": "running-mean", "baseline-window": 8}),
    Variant(
        "PPO with a critic",
        "sao",
        {
            "ratio": "ppo-clip",
            "clip-low": 0.2,
            "clip-high": 0.2,
            "dual-clip": 3.0,
            "lambda-alpha": None,
            "normalize": "whiten",
            "aggregation": "token-mean",
            "critic-updates": 1,
        },
    ),
    Variant("VAPO's lambda", "sao", {"ratio": "ppo-clip", "lambda-alpha": 0.05, "aggregation": "token-mean"}),
    Variant(
        "Decoupled PPO",
        "sao",
        {"ratio": "decoupled", "clip-low": 0.2, "clip-high": 0.2, "behaviour-cap": 5.0, "aggregation": "token-mean"},
    ),
    Variant(
        "REINFORCE++",
        "sao",
        {
            "advantage": "reinforce++",
            "ratio": "ppo-clip",
            "kl": "reward",
            "kl-coef": 0.01,
            "kl-estimator": "k1",
            "aggregation": "token-mean",
        },
    ),
    Variant("REINFORCE++-baseline", "grpo", {"advantage": "reinforce++-baseline", "aggregation": "token-mean"}),
    Variant(
        "GRPO",
        "grpo",
        {"std": "unbiased", "clip-low": 0.2, "clip-high": 0.2, "kl": "loss", "kl-coef": 0.04, "kl-estimator": "k3"},
    ),
    Variant("GRPO + DIS", "grpo", {"ratio": "dis", "dis-preset": "reasoning"}),
    Variant(
        "DAPO",
        "grpo",
        {
            "group-size": 16,
            "clip-low": 0.2,
            "clip-high": 0.28,
            "aggregation": "token-mean",
            "filter-tied": True,
            "overlong-tokens": 20480,
            "overlong-buffer": 4096,
        },
    ),
    Variant(
        "Dr.GRPO",
        "grpo",
        {"advantage": "dr-grpo", "aggregation": "token-sum", "aggregation-tokens": 3000, "filter-tied": False},
    ),
    Variant(
        "RLOO",
        "grpo",
        {
            "group-size": 4,
            "advantage": "rloo",
            "ratio": "none",
            "kl": "reward",
            "kl-coef": 0.03,
            "kl-estimator": "k1",
            "aggregation": "sequence-mean",
        },
    ),
    Variant("MaxRL", "grpo", {"advantage": "maxrl", "ratio": "dppo", "aggregation": "token-mean"}),
    Variant(
        "DPPO+KL",
        "grpo",
        {
            "advantage": "dr-grpo",
            "ratio": "dppo",
            "clip-low": 0.2,
            "clip-high": 0.2,
            "dppo-kl": 0.001,
            "aggregation": "token-mean",
        },
    ),
    Variant(
        "GSPO",
        "grpo",
        {"ratio": "gspo", "clip-low": 0.0003, "clip-high": 0.0004, "aggregation": "sequence-mean"},
    ),
    Variant("CISPO", "grpo", {"ratio": "cispo", "clip-low": 1.0, "clip-high": 4.0, "aggregation": "token-mean"}),
    Variant(
        "SAPO",
        "grpo",
        {"ratio": "sapo", "sapo-tau-positive": 1.0, "sapo-tau-negative": 1.05, "aggregation": "sequence-mean"},
    ),
    Variant("TIS", "grpo", {"old-policy": "trainer", "correction": "tis", "correction-high": 2.0}),
    Variant(
        "IcePop",
        "grpo",
        {"old-policy": "trainer", "correction": "icepop", "correction-low": 0.5, "correction-high": 5.0},
    ),
    Variant(
        "MIS",
        "grpo",
        {
            "old-policy": "trainer",
            "correction": "mis",
            "correction-level": "geometric",
            "correction-low": 0.999,
            "correction-high": 1.001,
            "correction-veto": 0.0001,
        },
    ),
    Variant(
        "DeepSeek-V3.2",
        "grpo",
        {"sequence-mask": 0.5, "kl": "loss", "kl-coef": 0.001, "kl-estimator": "k3"},
    ),
)
