#!/bin/bash
# 1 where the one <final> of the answer is the gold number, else 0. Without an answer it is 0.
mkdir -p /logs/verifier
found=$(grep -o '<final>.*</final>' /app/answer.txt 2> /dev/null)
if [ "$found" = "<final>5</final>" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
