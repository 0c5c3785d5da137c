"""An agent that fails on purpose."""

from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from reef_harness.harbor.agent import HarborAgent


class CrashesAtTheEnd(HarborAgent):
    """Hands in an answer, so that the verifier has something to judge, and crashes then."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """As its parent, and no further."""
        await super().run(instruction, environment, context)
        raise RuntimeError("the agent fell over")
