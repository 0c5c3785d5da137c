"""The commands of this room."""

import argparse


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add them to ``reef-harness``. Each sets ``run``: parsed arguments in, the exit status out."""
