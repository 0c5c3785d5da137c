"""The arithmetic recipe: a small task and a small model on which online learning shows in minutes on a CPU."""
