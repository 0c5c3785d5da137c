"""Reef beside TRL's GRPOTrainer: the same model, problems, grader, samples a step and learning rate, on this machine.

peer.py     TRL, in a venv of its own: one process, no service       -> snapshots
service.py  Reef as `reef serve` runs it, driven over HTTP           -> snapshots
curve.py    held-out accuracy of snapshots, measured afterwards      -> seconds and rollouts to a gain
model.py    a model of about 5M parameters beside the starter
"""
