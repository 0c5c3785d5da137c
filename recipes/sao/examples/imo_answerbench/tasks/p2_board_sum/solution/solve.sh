#!/bin/bash
printf '%s\n' '\boxed{\frac{-2023}{2024^2}}' > /app/answer.txt
