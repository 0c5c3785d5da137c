"""DAPO's overlong shaping (2503.14476): long answers are paid less, before length cuts them."""


def overlong_penalty(num_tokens: int, *, longest: int, buffer: int, penalty: float) -> float:
    """What is added to the reward of a rollout of `num_tokens` sampled tokens: 0 to -penalty.

    Nothing up to `longest - buffer` tokens, then in proportion to the tokens beyond, all of it from `longest` on. Past
    `longest` it stays, as in the paper and TRL; veRL lets it grow on.
    """
    beyond = num_tokens - (longest - buffer)
    if beyond <= 0:
        return 0.0
    return -penalty * min(beyond / buffer, 1.0)
