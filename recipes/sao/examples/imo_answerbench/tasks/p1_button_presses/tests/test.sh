#!/bin/bash
# Judges /app/answer.txt and writes the reward. Where this fails there is no reward: the answer was not judged.
mkdir -p /logs/verifier
python3 /tests/check.py boxed /app/answer.txt /tests/gold.txt /logs/verifier/reward.txt
