"""How far training is."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """What a trainer has done. A step may update the policy, the critic several times, or both."""

    steps: int = 0
    policy_updates: int = 0
    critic_steps: int = 0  # steps that the critic learned in
    critic_updates: int = 0
