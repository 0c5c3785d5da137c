"""Agents that fail on purpose."""

from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from reef_harness.harbor.agent import HarborAgent


class CrashesAtTheEnd(HarborAgent):
    """Hands in an answer, so that the verifier has something to judge, and crashes then."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """As its parent, and no further."""
        await super().run(instruction, environment, context)
        raise RuntimeError("the agent fell over")


class CrashesAtFirst(CrashesAtTheEnd):
    """As its parent in its first run of a process, as it should be in the next."""

    crashed = False

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Crash once."""
        if CrashesAtFirst.crashed:
            await HarborAgent.run(self, instruction, environment, context)
            return
        CrashesAtFirst.crashed = True
        await super().run(instruction, environment, context)
