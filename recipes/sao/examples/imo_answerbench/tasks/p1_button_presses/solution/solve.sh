#!/bin/bash
printf '%s\n' '\boxed{2^{u-2}}' > /app/answer.txt
