"""A method of one's own, as docs/methods.md shows it."""

import numpy as np

from reef.methods.base import Method
from reef.methods.weights import token_weights
from reef.section import Section
from reef.types import Drop, Pick, Selection


class Settings(Section):
    batch_size: int = 64
    threshold: float = 1.0


class Imitate(Method):
    """Repeat what was good: rollouts that scored `threshold` or more are trained on as if they were given."""

    def __init__(self, config):
        self.config = Settings.model_validate(config)

    def select(self, candidates, staleness, now):
        good = [c for c in candidates if c.score >= self.config.threshold and staleness[c.report_id] is not None]
        names = {c.report_id for c in good}
        drops = tuple(Drop(c.report_id, "not_imitated") for c in candidates if c.report_id not in names)
        picks = tuple(Pick(c.report_id, c.report_id) for c in good[: self.config.batch_size])
        return Selection(picks if len(picks) == self.config.batch_size else (), drops)

    def advantages(self, samples, views, history):
        return [sample.mask.astype(np.float32) for sample in samples]

    def token_weights(self, samples):
        return token_weights(samples, "rollout-mean")

    def token_loss(self, tokens):
        loss = -tokens.logprobs.where(tokens.mask, tokens.logprobs.new_zeros(()))
        return loss, {"imitated_logprob": -loss.detach()}

    def metrics(self, samples):
        return {"reward_mean": float(np.mean([sample.reward for sample in samples]))}
